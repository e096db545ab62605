"""O-80: GGUF models over several files, as gguf-py writes them."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from jpaged.errors import CheckpointError
from jpaged.models.formats.gguf_config import gguf_model_config
from jpaged.models.formats.gguf_file import GgufFile
from jpaged.models.formats.gguf_source import GgufSource
from jpaged.models.formats.gguf_split import SplitGgufFile, open_gguf
from jpaged.startup.model_files import ModelFiles, load_model_config, open_weights
from tests.loading.llama_gguf import finish

VOCAB, HIDDEN, MIDDLE = 32, 16, 24
LAYER = {
    "attn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, HIDDEN),
    "attn_v": (HIDDEN, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_norm": (HIDDEN,),
    "ffn_gate": (MIDDLE, HIDDEN),
    "ffn_up": (MIDDLE, HIDDEN),
    "ffn_down": (HIDDEN, MIDDLE),
}
SHAPES = {
    "token_embd.weight": (VOCAB, HIDDEN),
    **{f"blk.0.{name}.weight": shape for name, shape in LAYER.items()},
    "output_norm.weight": (HIDDEN,),
    "output.weight": (VOCAB, HIDDEN),
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., list[Path]]:
    """Writes the model with options of gguf-py's writer, and returns its files."""

    def write_parts(name: str = "model", **options: object) -> list[Path]:
        writer = gguf.GGUFWriter(tmp_path / f"{name}.gguf", "llama", **options)
        writer.add_context_length(64)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(1)
        writer.add_feed_forward_length(MIDDLE)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        random = np.random.default_rng(0)
        for tensor, shape in SHAPES.items():
            writer.add_tensor(tensor, random.normal(size=shape).astype(np.float32))
        finish(writer)
        return sorted(tmp_path.glob(f"{name}*.gguf"))

    return write_parts


def test_any_part_stands_for_the_whole_model(write: Callable[..., list[Path]]) -> None:
    """With the head in the last part, which a reader of the first alone would think tied."""
    [whole] = write("whole")
    parts = write(split_max_tensors=5)
    assert [path.name[-19:] for path in parts] == [f"{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    expected = GgufFile(whole)
    for path in parts:
        files = ModelFiles(kind="gguf", path=path, name="x")
        config, source = load_model_config(files), open_weights(files)
        assert config == gguf_model_config(expected) and not config.tie_word_embeddings
        assert sorted(source.names()) == sorted(GgufSource(expected, config).names())
        for name in source.names():
            theirs = GgufSource(expected, config).read(name)
            np.testing.assert_array_equal(source.read(name), theirs)
        assert source.location("lm_head.weight") == parts[2].name


@pytest.mark.parametrize(
    "options",
    [{"split_max_tensors": 6, "small_first_shard": True}, {"split_max_tensors": 100}],
    ids=["first part without tensors", "one part"],
)
def test_other_ways_to_split(write: Callable[..., list[Path]], options: dict) -> None:
    for path in write(**options):
        assert open_gguf(path).tensors.keys() == SHAPES.keys()


def test_one_part_of_one(write: Callable[..., list[Path]], tmp_path: Path) -> None:
    [path] = write()
    file = open_gguf(path.rename(tmp_path / "model-00001-of-00001.gguf"))
    assert file.tensors.keys() == SHAPES.keys()


def test_missing_parts_are_named(write: Callable[..., list[Path]]) -> None:
    first, second, third = write(split_max_tensors=5)
    first.unlink()
    third.unlink()
    message = f"part 2 of 3 of a split model.*missing in .*: {first.name}, {third.name}$"
    with pytest.raises(CheckpointError, match=message):
        open_gguf(second)


def test_renamed_parts_are_named(write: Callable[..., list[Path]], tmp_path: Path) -> None:
    first, second, third = write(split_max_tensors=5)
    renamed = first.rename(tmp_path / "mine.gguf")
    message = r"mine\.gguf is part 1 of 3 .* call it NAME-00001-of-00003\.gguf"
    with pytest.raises(CheckpointError, match=message):
        open_gguf(renamed)
    first.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match="is part 3 by its metadata, not 1"):
        open_gguf(second)


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        (b"blk.0.attn_v", b"blk.0.attn_q", "tensor 'blk.0.attn_q.weight' is in .* and in"),
        (b"split.tensors.count", b"split.tensors.cOunt", None),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    write: Callable[..., list[Path]], name: bytes, other: bytes, message: str | None
) -> None:
    first, second, _ = write(split_max_tensors=4)
    for path in (first, second):
        path.write_bytes(path.read_bytes().replace(name, other))
    if message is None:  # the count of all tensors need not be there
        assert open_gguf(second).tensors.keys() == SHAPES.keys()
        return
    with pytest.raises(CheckpointError, match=message):
        open_gguf(second)


def test_number_of_tensors_is_checked(write: Callable[..., list[Path]]) -> None:
    parts = write(split_max_tensors=5)
    other = write("more", split_max_tensors=5)
    assert GgufFile(parts[0]).metadata["split.tensors.count"] == len(SHAPES)
    file = GgufFile(other[0])
    file.metadata["split.tensors.count"] = 99
    with pytest.raises(CheckpointError, match="together have 99 tensors, but they have 12"):
        SplitGgufFile([file, *map(GgufFile, other[1:])])
