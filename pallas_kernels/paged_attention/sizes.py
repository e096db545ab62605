"""What the sizes of kernels have in common: whole numbers that a measurement may choose from."""

from dataclasses import field, fields
from typing import Any


def size(*choices: int) -> Any:
    """A field of a dataclass of sizes, with all that it may be, in ascending order."""
    return field(metadata={"choices": choices})


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """List the powers of two from `first` to `last`, both included."""
    return tuple(1 << bit for bit in range(first.bit_length() - 1, last.bit_length()))


def power_of_two_from(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def power_of_two_within(size: int) -> int:
    """Return the largest power of two that is at most `size`, and 1 for less than 1."""
    return 1 << max(size.bit_length() - 1, 0)


def choices_of(sizes: Any) -> dict[str, tuple[int, ...]]:
    """The fields of a dataclass of sizes, and what each of them may be."""
    return {each.name: each.metadata["choices"] for each in fields(sizes)}
