"""A scheduled batch as the packed arrays of `step_inputs.py`."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jpaged.execution.step_inputs import (
    NUM_SAMPLING_FLOATS,
    NUM_SAMPLING_INTS,
    ForwardShape,
    sampling_columns,
)
from jpaged.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest

NO_LOGPROBS = -1
NO_TARGET = -1


def pack_forward(
    batch: ScheduledBatch, shape: ForwardShape, block_tables: Int[np.ndarray, "R M"]
) -> Int[np.ndarray, "I"]:
    """block_tables: the table of every slot. A fresh array: the device may still read the last."""
    rows = batch.rows
    packed = np.zeros(shape.packed_size, np.int32)
    views = shape.split(packed)
    token_ids = [token for row in rows for token in _token_ids(row)]
    views["token_ids"][: len(token_ids)] = token_ids
    slots = [row.request.running_slot for row in rows]
    np.take(block_tables, slots, axis=0, out=views["block_tables"][: len(rows)])
    views["context_lens"][: len(rows)] = [row.start + row.num_tokens for row in rows]
    ends = np.cumsum([row.num_tokens for row in rows])
    views["query_starts"][1 : len(rows) + 1] = ends
    views["query_starts"][len(rows) + 1 :] = len(token_ids)
    views["num_decodes"][...] = len(batch.decodes)
    outputs = [end - 1 for row, end in zip(rows, ends, strict=True) for _ in row.sampled]
    outputs += [
        end - row.num_tokens + position - 1 - row.start
        for row, end in zip(rows, ends, strict=True)
        for position in row.scored
    ]
    views["output_tokens"][: len(outputs)] = outputs
    return packed


def _token_ids(row: ScheduledRequest) -> Sequence[int]:
    known = row.request.token_ids[row.start : row.start + row.num_tokens]
    if len(known) < row.num_tokens:
        assert len(known) == row.num_tokens - 1
        return [*known, ~row.request.running_slot]
    return known


def pack_sampling(
    batch: ScheduledBatch, num_rows: int, padding_slot: int
) -> tuple[Int[np.ndarray, "7 S"], Float[np.ndarray, "2 S"]]:
    """Sampled rows, then prompt tokens to score, as `pack_forward` orders their hidden states.

    Padding rows are greedy, so they never make a cheap batch an expensive one.
    """
    ints = np.zeros((NUM_SAMPLING_INTS, num_rows), np.int32)
    floats = np.zeros((NUM_SAMPLING_FLOATS, num_rows), np.float32)
    columns = sampling_columns(ints, floats)
    columns["slots"][:] = padding_slot
    columns["num_logprobs"][:] = NO_LOGPROBS
    columns["targets"][:] = NO_TARGET
    columns["top_p"][:] = 1.0
    for index, (request, position) in enumerate(batch.sampled):
        params = request.params
        wanted = request.num_reported_logprobs
        columns["slots"][index] = request.running_slot
        columns["positions"][index] = position
        # Halves of a seed are bit patterns: reinterpret those above 2**31.
        columns["seeds_low"][index] = _signed(request.seed & 0xFFFFFFFF)
        columns["seeds_high"][index] = _signed((request.seed >> 32) & 0xFFFFFFFF)
        columns["top_k"][index] = params.top_k
        columns["num_logprobs"][index] = NO_LOGPROBS if wanted is None else wanted
        columns["temperature"][index] = 0.0 if params.is_greedy else params.temperature
        columns["top_p"][index] = params.top_p
    index = len(batch.sampled)
    for row in batch.scored_rows:
        assert row.request.num_prompt_logprobs is not None
        for position in row.scored:
            columns["num_logprobs"][index] = row.request.num_prompt_logprobs
            columns["targets"][index] = row.request.token_ids[position]
            index += 1
    return ints, floats


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
