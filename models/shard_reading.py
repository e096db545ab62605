"""Reads one device's part of a parameter from a checkpoint, and nothing else.

A shard is copied chunk by chunk, so that the host holds no more than the shard itself.
"""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int

from jpaged.errors import CheckpointError
from jpaged.models.formats.tensor_source import TensorSource
from jpaged.models.weight_spec import Part, WeightSpec

# Of float32 values that are on the way from the file to a shard.
CHUNK_BYTES = 256 << 10
# Rows transposed at once: that many cache lines are open while a row of the result is written.
TRANSPOSE_ROWS = 16

Index = tuple[slice, ...]


def read_shard(
    spec: WeightSpec,
    index: Index,
    dtype: np.dtype,
    source: TensorSource,
    advance: Callable[[int], None],
) -> np.ndarray:
    """Read what the parameter has at `index`, which has a start and an end for every axis.

    Entries that no tensor has are zeros. The array is new, never a view of the file, which may
    change later. advance: called with numbers of bytes of the shard. Raises `CheckpointError`.
    """
    shard = np.zeros([each.stop - each.start for each in index], dtype)
    num_row_axes = len(spec.parts[0].rows)
    rows = index[spec.first_row_axis : spec.first_row_axis + num_row_axes]
    columns = index[0] if spec.transpose else [*index, slice(None)][num_row_axes]
    # Rows first, as the tensors have them.
    by_row = np.moveaxis(shard, 0, -1) if spec.transpose else shard
    num_copied = 0
    for part, start in zip(spec.parts, spec.starts(), strict=True):
        join = rows[spec.join]
        first = max(join.start - start, 0)
        last = min(join.stop - start, part.rows[spec.join])
        if first >= last:
            continue
        inside = (*rows[: spec.join], slice(first, last), *rows[spec.join + 1 :])
        numbers = _row_numbers(part)[inside]
        offset = start + first - join.start
        target = by_row[(slice(None),) * spec.join + (slice(offset, offset + last - first),)]
        for each, values in _runs(numbers, target, spec.join):
            _copy_rows(part.tensor, each, columns, values, source, advance)
        num_copied += target.nbytes
    advance(shard.nbytes - num_copied)
    return shard


def _row_numbers(part: Part) -> Int[np.ndarray, "..."]:
    """The tensor's row that stands at each place of the part."""
    groups = part.rows[0] // part.copies
    numbers = np.arange(part.num_rows, dtype=np.int64).reshape(groups, *part.rows[1:])
    return np.repeat(numbers, part.copies, axis=0)


def _runs(
    numbers: Int[np.ndarray, "..."], target: np.ndarray, join: int
) -> Iterator[tuple[range, np.ndarray]]:
    """Neighbouring rows of the tensor that are neighbours in the shard too, and where to."""
    columns = target.shape[numbers.ndim :]
    for outer in np.ndindex(numbers.shape[:join]):
        flat = numbers[outer].ravel()
        values = target[outer].reshape(len(flat), *columns)
        assert np.may_share_memory(values, target), "a copy of the shard would be filled"
        ends = [*np.flatnonzero(np.diff(flat) != 1) + 1, len(flat)]
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            yield range(int(flat[begin]), int(flat[end - 1]) + 1), values[begin:end]


def _copy_rows(
    tensor: str,
    rows: range,
    columns: slice,
    target: np.ndarray,
    source: TensorSource,
    advance: Callable[[int], None],
) -> None:
    """Copy these rows of a tensor into an array of as many rows."""
    bytes_per_row = 4 * max(target[0].size, 1)
    chunk = max(CHUNK_BYTES // bytes_per_row // TRANSPOSE_ROWS, 1) * TRANSPOSE_ROWS
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        values = source.read(tensor, slice(part.start, part.stop), columns)
        into = target[start : start + chunk]
        try:
            _convert(values, into)
        except FloatingPointError as error:
            raise CheckpointError(
                f"{tensor} in {source.location(tensor)} has values beyond the range of "
                f"{target.dtype}; choose another dtype"
            ) from error
        advance(into.nbytes)


def _convert(values: np.ndarray, into: np.ndarray) -> None:
    is_transposed = into.ndim > 1 and into.strides[0] < into.strides[1]
    step = TRANSPOSE_ROWS if is_transposed else max(len(values), 1)
    with np.errstate(over="raise"):
        for start in range(0, len(values), step):
            into[start : start + step] = values[start : start + step]
