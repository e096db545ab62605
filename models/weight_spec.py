"""How parameters are laid out, and which tensors of a checkpoint they are made from."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A tensor of the checkpoint that becomes a part of a parameter.

    rows: the axes into which the tensor's rows are split, as the parameter has them.
    copies: how many times in a row each entry of the first of these axes stands in the parameter.
    """

    tensor: str
    rows: tuple[int, ...]
    copies: int = 1

    @property
    def num_rows(self) -> int:
        """Rows of the tensor in the checkpoint."""
        return math.prod(self.rows) // self.copies


@dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """Layout of one parameter, and how it is made from a checkpoint.

    path: the parameter's path in the model's state, for example "layers.0.attention.qkv.kernel".
    axes: what each axis of the parameter counts, by name; see `sharding.SPLIT_AXES`.
    parts: tensors of the checkpoint, put one behind the other along the row axis `join`.
    transpose: the tensors' columns are the parameter's first axis, before the rows; otherwise
        they are its last one. Vectors have no columns.
    """

    path: str
    axes: tuple[str | None, ...]
    parts: tuple[Part, ...]
    join: int = 0
    transpose: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(part.tensor for part in self.parts)

    @property
    def first_row_axis(self) -> int:
        return 1 if self.transpose else 0

    def columns(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The columns' axis of a parameter of this shape; empty without."""
        return shape[:1] if self.transpose else shape[len(self.parts[0].rows) :]

    def describes(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of this shape is filled by the parts, but for a vocabulary's end."""
        rows = list(self.parts[0].rows)
        rows[self.join] = sum(part.rows[self.join] for part in self.parts)
        first, axes = self.first_row_axis, self.axes
        found = shape[first : first + len(rows)]
        return len(axes) == len(shape) and all(
            size == row or (axis == "vocab" and size > row)
            for size, row, axis in zip(found, rows, axes[first:], strict=False)
        )

    def starts(self) -> list[int]:
        """Where each part begins on the axis `join`."""
        sizes = [part.rows[self.join] for part in self.parts]
        return [sum(sizes[:index]) for index in range(len(sizes))]


def single(path: str, tensor: str, rows: int, axes: tuple[str | None, ...]) -> WeightSpec:
    """The layout of a parameter that is one tensor of the checkpoint as it is."""
    return WeightSpec(path=path, axes=axes, parts=(Part(tensor, (rows,)),))
