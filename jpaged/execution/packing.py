"""A scheduled batch as the arrays that its step takes from the host."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jpaged.execution.slot_mirror import SlotMirror
from jpaged.execution.step_inputs import NO_TARGET, ForwardShape
from jpaged.scheduling.request import Request
from jpaged.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest


@dataclass(frozen=True)
class PackedArrays:
    """Fresh arrays, as the device may still read those of the step before.

    forward: laid out by `ForwardShape`. early_writes: changes of the state that do not fit in
    there and go ahead of the step, laid out by `SlotState.write`.
    """

    forward: Int[np.ndarray, "I"]
    early_writes: list[Int[np.ndarray, "2 W"]]


def pack_step(
    batch: ScheduledBatch,
    sampled: Sequence[Request],
    shape: ForwardShape,
    mirror: SlotMirror,
    *,
    num_early_writes: int,
) -> PackedArrays:
    """Pack a batch, and what has changed in the slots since the last one.

    sampled: the requests that get a token, in the order of the rows. num_early_writes: the size
    of an array of early writes.
    """
    rows = batch.rows
    requests = [row.request for row in rows]
    row_slots = _slots(requests)
    slots = _ints(row_slots)
    starts = _ints([row.start for row in rows])
    num_tokens = _ints([row.num_tokens for row in rows])
    writes = mirror.take_over(requests + [sibling for row in rows for sibling in row.forks])
    writes += mirror.advance(slots, starts, starts + num_tokens)
    last, early = _split_writes(
        np.concatenate(writes, axis=1),
        num_last=shape.num_writes,
        num_early=num_early_writes,
        padding=mirror.shape.num_addresses,
    )
    packed = np.zeros(shape.packed_size, np.int32)
    views = shape.split(packed)
    token_ids = _token_ids(rows, row_slots)
    views["token_ids"][: len(token_ids)] = token_ids
    views["slots"][...] = mirror.shape.num_slots
    views["slots"][: len(rows)] = slots
    ends = np.cumsum(num_tokens, dtype=np.int32)
    views["query_starts"][1 : len(rows) + 1] = ends
    views["query_starts"][len(rows) + 1 :] = len(token_ids)
    views["num_decodes"][...] = len(batch.decodes)
    views["writes"][...] = last
    views["output_slots"][...] = mirror.shape.num_slots
    views["output_targets"][...] = NO_TARGET
    _pack_sampled(views, rows, sampled, ends)
    _pack_scored(views, rows, ends, first=len(sampled))
    return PackedArrays(packed, early)


def _token_ids(rows: Sequence[ScheduledRequest], slots: Sequence[int]) -> list[int]:
    """Return the tokens of the rows, and `~slot` for one that only the device knows yet."""
    token_ids: list[int] = []
    for row, slot in zip(rows, slots, strict=True):
        known, start = row.request.token_ids, row.start
        num_missing = start + row.num_tokens - len(known)
        if num_missing <= 0:
            token_ids += known[start : start + row.num_tokens]
        else:
            assert num_missing == 1, f"{row.request.request_id} lacks {num_missing} tokens"
            token_ids += known[start:]
            token_ids.append(~slot)
    return token_ids


def _pack_sampled(
    views: dict[str, np.ndarray],
    rows: Sequence[ScheduledRequest],
    sampled: Sequence[Request],
    ends: Int[np.ndarray, "S"],
) -> None:
    """Let each row be sampled from the logits of its last token, its forks included."""
    counts = [1 + len(row.forks) if row.is_sampled else 0 for row in rows]
    views["output_tokens"][: len(sampled)] = np.repeat(ends - 1, counts)
    views["output_slots"][: len(sampled)] = _slots(sampled)


def _pack_scored(
    views: dict[str, np.ndarray],
    rows: Sequence[ScheduledRequest],
    ends: Int[np.ndarray, "S"],
    *,
    first: int,
) -> None:
    """Let output `first` and those after it score prompt tokens from the logits before them."""
    for row, end in zip(rows, ends.tolist(), strict=True):
        if row.scored:
            outputs = slice(first, first + len(row.scored))
            before = end - row.num_tokens - row.start - 1
            views["output_tokens"][outputs] = [before + position for position in row.scored]
            views["output_slots"][outputs] = row.request.running_slot
            views["output_targets"][outputs] = [
                row.request.token_ids[position] for position in row.scored
            ]
            first = outputs.stop


def _split_writes(
    writes: Int[np.ndarray, "2 W"], *, num_last: int, num_early: int, padding: int
) -> tuple[Int[np.ndarray, "2 D"], list[Int[np.ndarray, "2 U"]]]:
    """Return what goes with the step and what goes ahead of it, `num_early` writes at a time.

    Each array is filled up with the address `padding`.
    """
    num_before = max(writes.shape[1] - num_last, 0)
    before, last = writes[:, :num_before], writes[:, num_before:]
    early = [
        _filled(before[:, first : first + num_early], num_early, padding)
        for first in range(0, num_before, num_early)
    ]
    return _filled(last, num_last, padding), early


def _filled(writes: Int[np.ndarray, "2 W"], size: int, padding: int) -> Int[np.ndarray, "2 D"]:
    filled = np.full((2, size), padding, np.int32)
    filled[:, : writes.shape[1]] = writes
    return filled


def _slots(requests: Iterable[Request]) -> list[int]:
    return [request.running_slot for request in requests]


def _ints(values: list[int]) -> Int[np.ndarray, "S"]:
    return np.array(values, np.int32)
