"""The GGUF container, whole and damaged."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from jpaged.errors import CheckpointError
from jpaged.models.formats.gguf_file import GgufFile
from jpaged.startup.model_files import ModelFiles
from tests.loading.llama_gguf import finish


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A small file with every kind of metadata and two tensors."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 62))
    writer.add_float32("a.f32", 0.1)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grüße 😀")
    writer.add_array("a.strings", ["x", "yy", "zzz"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.floats", [0.5, 1.5])
    writer.add_tensor("matrix", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor(
        "quantised",
        gguf.quants.quantize(np.eye(3, 64, dtype=np.float32), gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    finish(writer)
    return path


def assert_equal_to_reference(file: GgufFile) -> None:
    reference = gguf.GGUFReader(file.path)
    fields = {k: f for k, f in reference.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata == {key: field.contents() for key, field in fields.items()}
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        ours = file.tensors[tensor.name]
        assert ours.type == tensor.tensor_type
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert file.tensor_bytes(tensor.name).tobytes() == tensor.data.tobytes()


def test_reads_what_the_reference_reader_reads(path: Path) -> None:
    assert_equal_to_reference(GgufFile(path))


def test_reads_the_demo_model_as_the_reference_reader(demo_files: ModelFiles) -> None:
    assert_equal_to_reference(demo_files.gguf)


def test_truncated_file_is_refused_wherever_it_ends(path: Path) -> None:
    content = path.read_bytes()
    tensor_end = max(t.offset + t.num_bytes for t in GgufFile(path).tensors.values())
    for num_bytes in range(tensor_end):
        path.write_bytes(content[:num_bytes])
        with pytest.raises(CheckpointError, match=r"small\.gguf"):
            GgufFile(path)
    path.write_bytes(content[:tensor_end])  # only padding is missing
    assert len(GgufFile(path).tensors) == 2


def test_message_says_why_a_truncated_file_is_refused(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-64])
    with pytest.raises(CheckpointError, match="tensor 'quantised' ends at byte .* cut off"):
        GgufFile(path)
    path.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match="the file ends after 100"):
        GgufFile(path)
    path.write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"cannot read small\.gguf: cannot mmap an empty file"
    ):
        GgufFile(path)


def test_damaged_bytes_never_cause_another_error(path: Path) -> None:
    """Headers with one byte changed either still make sense or are refused."""
    content = bytearray(path.read_bytes())
    header_size = min(tensor.offset for tensor in GgufFile(path).tensors.values())
    num_refused = 0
    for position in range(header_size):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            GgufFile(path)
        except CheckpointError:
            num_refused += 1
    assert num_refused > header_size / 4


def patched(path: Path, position: int, value: bytes) -> Path:
    content = bytearray(path.read_bytes())
    content[position : position + len(value)] = value
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"PK\3\4", "is not a GGUF file: it starts with b'PK"),
        (4, struct.pack("<I", 1), "is version 1 of the GGUF format"),
        (4, struct.pack(">I", 3), "is a big-endian file of the GGUF format"),
        (8, struct.pack("<Q", 1 << 60), "is damaged"),
        (16, struct.pack("<Q", 1 << 60), "is damaged"),
        (24, struct.pack("<Q", 1 << 63), "a string of 9223372036854775808 bytes reaches beyond"),
    ],
)
def test_header_that_cannot_be_is_refused(
    path: Path, position: int, value: bytes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        GgufFile(patched(path, position, value))


def entry_of(path: Path, name: bytes) -> int:
    """Position of what follows the name in the tensor's entry: dimensions, sizes, type, offset."""
    return path.read_bytes().index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


@pytest.mark.parametrize(
    ("shift", "value", "message"),
    [
        (0, struct.pack("<I", 5), "tensor 'matrix' has 5 dimensions"),
        (4, struct.pack("<Q", 1 << 40), "tensor 'matrix' ends at byte"),
        (20, struct.pack("<I", 250), "tensor 'matrix' is of unknown type 250"),
        (20, struct.pack("<I", 12), "32 values, no multiple of Q4_K's block size 256"),
        (24, struct.pack("<Q", 1 << 62), "tensor 'matrix' ends at byte"),
    ],
)
def test_tensor_that_cannot_be_is_refused(
    path: Path, shift: int, value: bytes, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        GgufFile(patched(path, entry_of(path, b"matrix") + shift, value))


def test_names_that_occur_twice_are_refused(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"a.i8", b"a.u8"))
    with pytest.raises(CheckpointError, match="metadata key 'a.u8' occurs twice"):
        GgufFile(path)


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "aligned.gguf", "llama")
    writer.add_custom_alignment(128)
    writer.add_tensor("x", np.arange(5, dtype=np.float32))
    writer.add_tensor("y", np.arange(7, dtype=np.float32))
    finish(writer)
    file = GgufFile(tmp_path / "aligned.gguf")
    assert file.tensors["y"].offset % 128 == 0
    assert_equal_to_reference(file)
