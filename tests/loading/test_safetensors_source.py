"""Weights in safetensors files, one or several."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.formats.safetensors_source import INDEX_FILE, SafetensorsSource

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three tensors in three shards and their index."""
    weight_map = {}
    for number, shard in enumerate(SHARDS):
        name = f"model.layers.{number}.input_layernorm.weight"
        save_file({name: np.full((4,), number, np.float32)}, tmp_path / shard)
        weight_map[name] = shard
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def change_index(folder: Path, **weight_map: str) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    names = list(index["weight_map"])
    for position, shard in weight_map.items():
        index["weight_map"][names[int(position.removeprefix("tensor"))]] = shard
    (folder / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.torch
@pytest.mark.parametrize("max_shard_size", ["1GB", "40KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
    ],
)
def test_llama_saved_by_transformers_is_read_back_bit_by_bit(
    make_llama: Callable[..., Any],
    tmp_path: Path,
    overrides: dict[str, Any],
    dtype: str,
    max_shard_size: str,
) -> None:
    import torch

    model = make_llama(**overrides).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX_FILE).exists() == (max_shard_size == "40KB")
    source = SafetensorsSource(tmp_path)
    expected = model.state_dict()
    if overrides.get("tie_word_embeddings"):
        del expected["lm_head.weight"]
    assert set(source.names()) == set(expected)
    for name, tensor in expected.items():
        values = source.read(name)
        part = values[2:9] if values.ndim == 1 else values[2:9, 5:]
        np.testing.assert_array_equal(source.read(name, slice(2, 9), slice(5, None)), part)
        assert source.shape(name) == values.shape == tuple(tensor.shape)
        assert values.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert source.num_bytes(name) == values.nbytes
        assert values.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    config = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert config.head_dim == overrides.get("head_dim", 16)


def test_reads_the_shards_of_the_index(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    for number, name in enumerate(source.names()):
        assert source.location(name) == SHARDS[number]
        np.testing.assert_array_equal(source.read(name), np.full((4,), number, np.float32))


def test_stray_weight_files_are_left_alone(sharded: Path) -> None:
    """O-44."""
    name = "model.layers.0.input_layernorm.weight"
    for stray in ("model.safetensors", "model-00004-of-00003.safetensors"):
        save_file({name: np.full((4,), 99, np.float32), "extra": np.zeros(1)}, sharded / stray)
    source = SafetensorsSource(sharded)
    assert len(list(source.names())) == 3
    assert source.read(name).tolist() == [0, 0, 0, 0]


def test_missing_shard_is_named(sharded: Path) -> None:
    """O-44."""
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=f"weight file {SHARDS[1]} is missing"):
        SafetensorsSource(sharded)


def test_renamed_shard_is_named(sharded: Path) -> None:
    """O-44."""
    (sharded / SHARDS[2]).rename(sharded / "weights.safetensors")
    with pytest.raises(CheckpointError, match=f"weight file {SHARDS[2]} is missing"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize(
    "place", ["../x.safetensors", "/tmp/x.safetensors", "a/b", "..", "", "a\0"]
)
def test_index_that_points_outside_the_folder_is_refused(sharded: Path, place: str) -> None:
    """O-44."""
    save_file({"x": np.zeros(1)}, sharded.parent / "x.safetensors")
    change_index(sharded, tensor1=place)
    with pytest.raises(CheckpointError, match="shards must lie in the same folder"):
        SafetensorsSource(sharded)


def test_shard_without_the_promised_tensor_is_named(sharded: Path) -> None:
    change_index(sharded, tensor0=SHARDS[1])
    message = rf"{SHARDS[1]} does not have .*: model\.layers\.0\.input_layernorm\.weight"
    with pytest.raises(CheckpointError, match=message):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": 3}', "\xff"])
def test_damaged_index_is_named(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} is damaged"):
        SafetensorsSource(sharded)


def test_truncated_file_is_named(sharded: Path) -> None:
    content = (sharded / SHARDS[1]).read_bytes()
    for num_bytes in range(len(content)):
        (sharded / SHARDS[1]).write_bytes(content[:num_bytes])
        with pytest.raises(CheckpointError, match=f"weight file {SHARDS[1]} is damaged: ."):
            SafetensorsSource(sharded)


def test_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04" + b"not safetensors" * 10)
    with pytest.raises(CheckpointError, match=r"weight file model\.safetensors is damaged"):
        SafetensorsSource(tmp_path)


def test_integer_tensor_is_refused_when_it_is_read(tmp_path: Path) -> None:
    tensors = {"ids": np.zeros(3, np.int64), "x": np.ones(2, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.read("x").tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"ids in model\.safetensors is of type I64; .* BF16"):
        source.read("ids")


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("file_name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused_and_not_opened(tmp_path: Path, file_name: str) -> None:
    """O-59."""
    marker = tmp_path / "marker"
    (tmp_path / file_name).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(CheckpointError, match=rf"only pickled weights \({file_name}\).*refused"):
        SafetensorsSource(tmp_path)
    assert not marker.exists()


def test_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"neither model\.safetensors nor {INDEX_FILE}"):
        SafetensorsSource(tmp_path)
