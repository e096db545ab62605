"""Turns scheduled batches into calls of the devices, and reads what comes back.

The host runs one step ahead of the device. Sampled tokens stay in the device's `SlotState`, where
the next step reads them; the host reads them when it needs them.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import numpy as np

from jpaged.execution.buckets import smallest_bucket
from jpaged.execution.device_calls import (
    DeviceCall,
    ForgetCall,
    StepCall,
    SwapInCall,
    SwapOutCall,
    TimeSwapCall,
)
from jpaged.execution.executor import Executor
from jpaged.execution.packing import pack_step
from jpaged.execution.programs import ProgramSpec
from jpaged.execution.sampler import Samples
from jpaged.execution.slot_mirror import SlotMirror
from jpaged.outputs import TokenLogprobs
from jpaged.scheduling.block_pool import SINK_BLOCK
from jpaged.scheduling.prefill_clock import StepTrace
from jpaged.scheduling.request import Request
from jpaged.scheduling.scheduled_batch import ScheduledBatch

Scored = tuple[Request, range]  # and the positions in its prompt


@dataclass(frozen=True)
class PackedStep:
    """The host's part of a step. requests: those that get a token, in the order of the rows."""

    requests: list[Request]
    scored: list[Scored]
    num_tokens: int
    has_prefill: bool
    call: StepCall


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


class SwappedContent:
    """Blocks that the devices keep in host memory under `key` for as long as this lives."""

    def __init__(self, key: int, forget: Callable[[int], None]) -> None:
        self.key = key
        # The collector may come at any time and in any thread.
        weakref.finalize(self, forget, key).atexit = False


class Runner:
    """Not thread-safe; steps are executed by the device in the order of their launch.

    send: passes each call on to other hosts, before this one carries it out.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        executor: Executor,
        *,
        send: Callable[[DeviceCall], None] | None = None,
    ) -> None:
        self.spec = spec
        self.executor = executor
        self._send = send
        self._mirror = SlotMirror(spec.slot_shape, block_size=spec.kv_cache.block_size)
        self._keys = count()
        self._forgotten: deque[int] = deque()

    def pack(self, batch: ScheduledBatch) -> PackedStep:
        """Make the arrays that a step takes from the host."""
        shape = self.spec.forward_shape(batch.num_tokens, decode_only=not batch.prefills)
        requests, scored = batch.sampled, [(row.request, row.scored) for row in batch.scored_rows]
        arrays = pack_step(
            batch, requests, shape, self._mirror, num_early_writes=self.spec.num_early_writes
        )
        num_sample_rows = 0
        if requests or scored:
            num_sample_rows = smallest_bucket(self.spec.row_buckets, batch.num_outputs)
        call = StepCall(
            shape=shape,
            forward=arrays.forward,
            early_writes=arrays.early_writes,
            copies=self._pack_copies(batch.copies) if batch.copies else None,
            num_sample_rows=num_sample_rows,
        )
        return PackedStep(requests, scored, batch.num_tokens, bool(batch.prefills), call)

    def launch(self, step: PackedStep) -> LaunchedStep:
        """Start a step and return at once."""
        trace = StepTrace(step.num_tokens, step.has_prefill, time.perf_counter())
        samples: Samples | None = self._run(step.call)
        if samples is not None:
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
            key = next(self._keys)
            self._run(SwapOutCall(key, out.blocks))
            out.swapped.data = SwappedContent(key, self._forgotten.append)
        for back in batch.swap_ins:
            self._run(SwapInCall(back.swapped.data.key, back.targets))
        if self._forgotten:
            self._run(ForgetCall([self._forgotten.popleft() for _ in range(len(self._forgotten))]))

    def time_swap(self) -> float:
        """Seconds that one block takes to host memory and back."""
        return self._run(TimeSwapCall())

    def _run(self, call: DeviceCall) -> Any:
        if self._send is not None:
            self._send(call)
        return self.executor.run(call)

    def _pack_copies(self, copies: list[tuple[int, int]]) -> np.ndarray:
        packed = np.full(
            (2, smallest_bucket(self.spec.copy_buckets, len(copies))), SINK_BLOCK, np.int32
        )
        packed[1] = self.spec.kv_cache.layer_shape[0]  # past the end: no copy
        packed[:, : len(copies)] = np.transpose(copies)
        return packed
