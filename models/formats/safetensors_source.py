"""Weights from a folder of safetensors files."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jpaged.errors import CheckpointError
from jpaged.models.formats.tensor_source import ALL

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUPPORTED_DTYPES = ("F32", "F16", "BF16")
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsSource:
    """The tensors of `model.safetensors`, or of the shards that the index file names.

    Where there is an index, a tensor comes from the shard that the index gives for it, and other
    weight files in the folder are left alone.
    """

    def __init__(self, folder: Path) -> None:
        if (folder / INDEX_FILE).is_file():
            self._shard_of = _read_index(folder)
        elif (folder / SINGLE_FILE).is_file():
            self._shard_of = dict.fromkeys(_open(folder / SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise _no_weights(folder)
        self._shards = {shard: _open(folder / shard) for shard in set(self._shard_of.values())}
        _check_index(self._shard_of, self._shards)

    def names(self) -> Iterable[str]:
        return self._shard_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def num_bytes(self, name: str) -> int:
        bytes_per_value = 4 if self._slice(name).get_dtype() == "F32" else 2
        return math.prod(self.shape(name)) * bytes_per_value

    def location(self, name: str) -> str:
        return self._shard_of[name]

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> np.ndarray:
        stored = self._slice(name)
        dtype = stored.get_dtype()
        if dtype not in SUPPORTED_DTYPES:
            raise CheckpointError(
                f"{name} in {self.location(name)} is of type {dtype}; "
                f"supported: {', '.join(SUPPORTED_DTYPES)}"
            )
        if len(stored.get_shape()) == 1:
            return stored[rows]
        return stored[rows, columns]

    def _slice(self, name: str) -> Any:
        return self._shards[self._shard_of[name]].get_slice(name)


def _open(path: Path) -> Any:
    """Checks the header and that the file has the length it promises; reads no values."""
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise CheckpointError(f"weight file {path.name} is missing in {path.parent}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weight file {path.name} is damaged: {error}") from error


def _read_index(folder: Path) -> dict[str, str]:
    try:
        index = json.loads((folder / INDEX_FILE).read_text("utf-8"))
        weight_map = dict(index["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{INDEX_FILE} is damaged: it has no weight_map") from error
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise CheckpointError(
                f"{INDEX_FILE} says that {name} is in {shard!r:.120}, but shards must lie in the "
                "same folder"
            )
    return weight_map


def _is_file_name(text: str) -> bool:
    return Path(text).name == text and text not in ("", "..") and "\0" not in text


def _check_index(shard_of: dict[str, str], shards: dict[str, Any]) -> None:
    for shard, opened in shards.items():
        present = set(opened.keys())
        missing = sorted(n for n, s in shard_of.items() if s == shard and n not in present)
        if missing:
            raise CheckpointError(
                f"{shard} does not have the tensors that {INDEX_FILE} promises: "
                f"{', '.join(missing)}"
            )


def _no_weights(folder: Path) -> CheckpointError:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if pickled:
        return CheckpointError(
            f"{folder} has only pickled weights ({', '.join(pickled)}), which are refused: loading "
            "a pickle can run any code. Save the model again with transformers' "
            "save_pretrained(..., safe_serialization=True), or get its safetensors files."
        )
    return CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")
