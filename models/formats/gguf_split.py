"""GGUF models that are split over several files, as llama.cpp's gguf-split writes them."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jpaged.errors import CheckpointError
from jpaged.models.config_reader import ConfigReader
from jpaged.models.formats.gguf_file import GgufFile, GgufTensor

_PART_NAME = re.compile(
    r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.I
)


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF model by its file, or by any of its parts when all of them lie side by side.

    Raises `CheckpointError` that names the parts that are missing.
    """
    file = GgufFile(path)
    count = _split_value(file, "count", 1)
    if count <= 1:
        return file
    return SplitGgufFile([_open_part(each, number) for number, each in enumerate(_paths(file))])


class SplitGgufFile(GgufFile):
    """All parts of a split model as one file: metadata of the first part, tensors of all."""

    def __init__(self, parts: Sequence[GgufFile]) -> None:
        first = parts[0]
        self.path = first.path
        self.metadata = first.metadata
        self.tensors: dict[str, GgufTensor] = {}
        self._part_of: dict[str, GgufFile] = {}
        for part in parts:
            twice = self.tensors.keys() & part.tensors.keys()
            if twice:
                raise CheckpointError(
                    f"tensor {min(twice)!r:.120} is in {part.path.name} and in "
                    f"{self.location(min(twice))}: these are no parts of one model"
                )
            self.tensors |= part.tensors
            self._part_of |= dict.fromkeys(part.tensors, part)
        expected = _split_value(first, "tensors.count", len(self.tensors))
        if len(self.tensors) != expected:
            raise CheckpointError(
                f"{first.path.name} says that all parts together have {expected} tensors, but "
                f"they have {len(self.tensors)}: get all parts again from the same place"
            )

    def location(self, name: str) -> str:
        return self._part_of[name].path.name

    def tensor_bytes(self, name: str) -> np.ndarray:
        return self._part_of[name].tensor_bytes(name)


def _split_value(file: GgufFile, key: str, default: int) -> int:
    reader = ConfigReader(file.metadata, name=file.path.name)
    return reader.integer(f"split.{key}", default, minimum=0)


def _paths(file: GgufFile) -> list[Path]:
    """Where all parts are. Metadata counts them from 0, names count from 1."""
    count, number = _split_value(file, "count", 1), _split_value(file, "no", 0)
    name = f"{file.path.name} is part {number + 1} of {count} of a split model"
    match = _PART_NAME.fullmatch(file.path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count):
        raise CheckpointError(
            f"{name}, but its name does not say so, and the other parts are found by it: call it "
            f"NAME-{number + 1:05}-of-{count:05}.gguf, as the others are"
        )
    paths = [
        file.path.with_name(f"{match['model']}-{each:05}-of-{count:05}{match['suffix']}")
        for each in range(1, count + 1)
    ]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{name}, and all parts must lie in one folder; missing in {file.path.parent}: "
            f"{', '.join(missing)}"
        )
    return paths


def _open_part(path: Path, number: int) -> GgufFile:
    part = GgufFile(path)
    own = _split_value(part, "no", 0)
    if own != number:
        raise CheckpointError(
            f"{path.name} is part {own + 1} by its metadata, not {number + 1}: name it so again"
        )
    return part
