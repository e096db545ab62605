"""The GGUF container: metadata and the places of tensors, read without touching their values.

The `gguf` package's own reader makes several numpy arrays for each of a vocabulary's tokens, which
takes seconds; this one is made for files that are only read, and checks every length it meets.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from jpaged.errors import CheckpointError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_SCALAR_FORMATS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """shape: slowest axis first, as in numpy. offset: of the first byte, from the file's start."""

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufFile:
    """A GGUF file, open for as long as this object lives.

    metadata: values by key; arrays are lists.
    tensors: by the names used in the file.

    Raises `CheckpointError` when the file is damaged or ends before its last tensor does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = _map(path)
        cursor = _Cursor(self._buffer, path.name)
        cursor.check_magic()
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = cursor.string()
            if key in self.metadata:
                cursor.fail(f"metadata key {key!r:.120} occurs twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        entries = [cursor.tensor_entry() for _ in range(num_tensors)]
        data_start = cursor.offset + -cursor.offset % self._alignment(cursor)
        self.tensors: dict[str, GgufTensor] = {}
        for name, type_id, shape, offset in entries:
            if name in self.tensors:
                cursor.fail(f"tensor {name!r:.120} occurs twice")
            self.tensors[name] = _place(cursor, name, type_id, shape, data_start + offset)

    def location(self, name: str) -> str:
        """Name of the file that has the tensor, for messages."""
        return self.path.name

    def tensor_bytes(self, name: str) -> np.ndarray:
        """The tensor's bytes as uint8: a read-only view of the file."""
        tensor = self.tensors[name]
        return np.frombuffer(
            self._buffer, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset
        )

    def _alignment(self, cursor: "_Cursor") -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            cursor.fail(f"general.alignment must be a power of two, got {alignment!r:.40}")
        return alignment


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"cannot read {path.name}: {error}") from error


class _Cursor:
    """Reads one value after the other; whatever would lie beyond the end of the file fails."""

    def __init__(self, buffer: mmap.mmap, name: str) -> None:
        self.buffer = buffer
        self.name = name
        self.offset = 0

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.name} is damaged: {reason} (at byte {self.offset})")

    def check_magic(self) -> None:
        if self.buffer[:4] != MAGIC:
            raise CheckpointError(
                f"{self.name} is not a GGUF file: it starts with {self.buffer[:4]!r}, not {MAGIC!r}"
            )
        self.offset = 4
        version = self.scalar("I")
        if version not in SUPPORTED_VERSIONS:
            kind = "a big-endian file" if version & 0xFFFF == 0 else f"version {version}"
            raise CheckpointError(
                f"{self.name} is {kind} of the GGUF format; supported: little-endian files of "
                f"version {' and '.join(map(str, SUPPORTED_VERSIONS))}"
            )

    def scalar(self, number_format: str) -> Any:
        start = self._take(struct.calcsize(number_format))
        return struct.unpack_from(f"<{number_format}", self.buffer, start)[0]

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self, type_id: int) -> Any:
        if type_id == GGUFValueType.STRING:
            return self.string()
        if type_id == GGUFValueType.ARRAY:
            return self._array()
        return self.scalar(self._scalar_format(type_id))

    def tensor_entry(self) -> tuple[str, int, tuple[int, ...], int]:
        """Name, type, shape and offset from the start of the data."""
        name = self.string()
        num_dimensions = self.scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.fail(f"tensor {name!r:.120} has {num_dimensions} dimensions")
        # The file has the fastest axis first.
        shape = tuple(self.scalar("Q") for _ in range(num_dimensions))[::-1]
        return name, self.scalar("I"), shape, self.scalar("Q")

    def _take(self, num_bytes: int) -> int:
        """Where the next bytes start; moves behind them."""
        start = self.offset
        if num_bytes > len(self.buffer) - start:
            self.fail(f"{num_bytes} bytes expected, but the file ends after {len(self.buffer)}")
        self.offset = start + num_bytes
        return start

    def _scalar_format(self, type_id: int) -> str:
        if type_id not in _SCALAR_FORMATS:
            self.fail(f"unknown metadata type {type_id}")
        return _SCALAR_FORMATS[GGUFValueType(type_id)]

    def _array(self) -> list[Any]:
        type_id, count = self.scalar("I"), self.scalar("Q")
        if type_id == GGUFValueType.STRING:
            return self._strings(count)
        number_format = np.dtype(self._scalar_format(type_id)).newbyteorder("<")
        start = self._take(count * number_format.itemsize)
        return np.frombuffer(self.buffer, number_format, count, start).tolist()

    def _strings(self, count: int) -> list[str]:
        """Vocabularies have 100,000 strings, so this is one plain loop."""
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(self.buffer, self.offset)
                start = self.offset + _LENGTH.size
                if length > len(self.buffer) - start:
                    self.fail(f"a string of {length} bytes reaches beyond the end of the file")
                self.offset = start + length
                strings.append(str(self.buffer[start : self.offset], "utf-8"))
        except struct.error:
            self.fail(f"the file ends after {len(self.buffer)} bytes, inside the metadata")
        except UnicodeDecodeError:
            self.fail("a string is not valid UTF-8")
        return strings


def _place(
    cursor: _Cursor, name: str, type_id: int, shape: tuple[int, ...], offset: int
) -> GgufTensor:
    if type_id not in GGML_QUANT_SIZES:
        cursor.fail(f"tensor {name!r:.120} is of unknown type {type_id}")
    tensor_type = GGMLQuantizationType(type_id)
    block_size, bytes_per_block = GGML_QUANT_SIZES[tensor_type]
    if shape[-1] % block_size:
        cursor.fail(
            f"rows of tensor {name!r:.120} have {shape[-1]} values, no multiple of "
            f"{tensor_type.name}'s block size {block_size}"
        )
    num_values = 1
    for size in shape:
        num_values *= size
    num_bytes = num_values // block_size * bytes_per_block
    if offset + num_bytes > len(cursor.buffer):
        cursor.fail(
            f"tensor {name!r:.120} ends at byte {offset + num_bytes}, but the file has "
            f"{len(cursor.buffer)} bytes; it is probably cut off"
        )
    return GgufTensor(type=tensor_type, shape=shape, offset=offset, num_bytes=num_bytes)
