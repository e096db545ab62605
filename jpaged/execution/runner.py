"""Executes scheduled batches: owns the parameters, the KV pools and the compiled programs.

The host runs one step ahead of the device. Sampled tokens stay in the device's `SlotState`, where
the next step reads them; the host reads them when it needs them.
"""

import time
from dataclasses import dataclass

import jax
import numpy as np

from jpaged.execution.block_mover import BlockMover
from jpaged.execution.buckets import smallest_bucket
from jpaged.execution.packing import PackedArrays, pack_step
from jpaged.execution.programs import Programs, ProgramSpec
from jpaged.execution.sampler import Samples
from jpaged.execution.slot_mirror import SlotMirror
from jpaged.execution.slot_state import SlotState
from jpaged.execution.step_inputs import ForwardShape
from jpaged.outputs import TokenLogprobs
from jpaged.scheduling.block_pool import SINK_BLOCK
from jpaged.scheduling.prefill_clock import StepTrace
from jpaged.scheduling.request import Request
from jpaged.scheduling.scheduled_batch import ScheduledBatch

Scored = tuple[Request, range]  # and the positions in its prompt


@dataclass(frozen=True)
class PackedStep:
    """The host's part of a step.

    num_sample_rows: rows of the sampling program. copies: None without any, which is no program's
    input then.
    """

    requests: list[Request]
    scored: list[Scored]
    num_tokens: int
    has_prefill: bool
    shape: ForwardShape
    num_sample_rows: int
    arrays: PackedArrays
    copies: np.ndarray | None


@dataclass(frozen=True)
class LaunchedStep:
    """A step on its way. samples: those of `requests`, in order, then the prompt tokens of
    `scored`, then padding; None if nobody wants logits."""

    requests: list[Request]
    scored: list[Scored]
    trace: StepTrace
    samples: Samples | None

    def read_tokens(self) -> list[int]:
        """Wait for the step and return the token of every sampled request."""
        if self.samples is None:
            return []
        return np.asarray(self.samples.tokens)[: len(self.requests)].tolist()

    def read_logprobs(self) -> list[TokenLogprobs | None]:
        """Of every sampled request that wants them, then of the scored prompt tokens."""
        wanted = [request.num_reported_logprobs for request in self.requests]
        wanted += [
            request.num_prompt_logprobs for request, positions in self.scored for _ in positions
        ]
        if self.samples is None or not any(number is not None for number in wanted):
            return [None] * len(wanted)
        logprobs, top_ids, top_logprobs = (
            np.asarray(values).tolist()
            for values in (self.samples.logprobs, self.samples.top_ids, self.samples.top_logprobs)
        )
        return [
            None
            if number is None
            else TokenLogprobs(
                logprob=logprobs[row],
                top=tuple(zip(top_ids[row][:number], top_logprobs[row][:number], strict=True)),
            )
            for row, number in enumerate(wanted)
        ]


class Runner:
    """Not thread-safe; steps are executed by the device in the order of their launch."""

    def __init__(self, spec: ProgramSpec, programs: Programs) -> None:
        self.spec = spec
        self._programs = programs
        self.block_mover = BlockMover(programs, num_pool_blocks=spec.kv_cache.layer_shape[0])
        self._params = spec.model.params
        self._pools = spec.kv_cache.allocate()
        self._state = SlotState.zeros(spec.slot_shape, spec.whole)
        self._mirror = SlotMirror(spec.slot_shape, block_size=spec.kv_cache.block_size)

    def pack(self, batch: ScheduledBatch) -> PackedStep:
        """Make the arrays that a step takes from the host."""
        shape = self.spec.forward_shape(batch.num_tokens, decode_only=not batch.prefills)
        requests = batch.sampled
        arrays = pack_step(
            batch, requests, shape, self._mirror, num_early_writes=self.spec.num_early_writes
        )
        return PackedStep(
            requests=requests,
            scored=[(row.request, row.scored) for row in batch.scored_rows],
            num_tokens=batch.num_tokens,
            has_prefill=bool(batch.prefills),
            shape=shape,
            num_sample_rows=smallest_bucket(self.spec.row_buckets, max(batch.num_outputs, 1)),
            arrays=arrays,
            copies=self._pack_copies(batch.copies) if batch.copies else None,
        )

    def launch(self, step: PackedStep) -> LaunchedStep:
        """Start a step and return at once."""
        trace = StepTrace(step.num_tokens, step.has_prefill, time.perf_counter())
        if step.copies is not None:
            copy = self._programs.copy[step.copies.shape[1]]
            self._pools = copy(self._pools, step.copies)
        for writes in step.arrays.early_writes:
            self._state = self._programs.write(self._state, writes)
        outputs, self._pools, self._state = self._programs.forward[step.shape](
            self._params, self._pools, self._state, step.arrays.forward
        )
        if not step.requests and not step.scored:
            return LaunchedStep([], [], trace, None)
        samples, self._state = self._programs.sample[step.num_sample_rows](
            self._params, outputs, self._state
        )
        wants_logprobs = bool(step.scored) or any(
            request.num_reported_logprobs is not None for request in step.requests
        )
        for values in jax.tree.leaves(samples) if wants_logprobs else [samples.tokens]:
            values.copy_to_host_async()
        return LaunchedStep(step.requests, step.scored, trace, samples)

    def move_blocks(self, batch: ScheduledBatch) -> None:
        """Start what the batch swaps. Comes before `launch`, whose step writes the blocks that
        went, and reads those that came."""
        for out in batch.swap_outs:
            out.swapped.data = self.block_mover.fetch(self._pools, out.blocks)
        for back in batch.swap_ins:
            self._pools = self.block_mover.put_back(self._pools, back.swapped.data, back.targets)

    def time_swap(self) -> float:
        """Seconds that one block takes to host memory and back."""
        seconds, self._pools = self.block_mover.time_round_trip(self._pools)
        return seconds

    def _pack_copies(self, copies: list[tuple[int, int]]) -> np.ndarray:
        packed = np.full(
            (2, smallest_bucket(self.spec.copy_buckets, len(copies))), SINK_BLOCK, np.int32
        )
        packed[1] = self.spec.kv_cache.layer_shape[0]  # past the end: no copy
        packed[:, : len(copies)] = np.transpose(copies)
        return packed
