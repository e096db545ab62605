"""Which requests run in a step, and how many tokens of each. Host side only: imports no JAX.

Continuous batching (Yu et al. 2022, Orca) with chunked prefill (Agrawal et al. 2024,
Sarathi-Serve): a step takes one token of every decoding request, then fills the token budget with
chunks of prompts, first come, first served. `admission.py` starts waiting requests,
`preemption.py` takes blocks from running ones.

The scheduler runs one step ahead of what the host knows: it may schedule a token whose id only
the device has seen yet (`Request.num_in_flight_tokens`).
"""

import time
from collections.abc import Iterable, Iterator, Sequence

from jpaged.outputs import FinishReason
from jpaged.scheduling.admission import Admission
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.block_tables import BlockTables
from jpaged.scheduling.holdings import Holdings
from jpaged.scheduling.pool_limits import PoolLimits
from jpaged.scheduling.preemption import Preemption
from jpaged.scheduling.request import Request, RequestStatus
from jpaged.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest
from jpaged.scheduling.swap import SwapSpace
from jpaged.scheduling.waiting_queue import WaitingQueue


class Scheduler:
    """Plans one step after the other. Requests come by `add` and `fork`, and go by `finish`."""

    def __init__(
        self,
        block_pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = False,
        swap_space: SwapSpace | None = None,
    ) -> None:
        self.block_pool = block_pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.holdings = Holdings(
            BlockTables(
                block_pool, block_size=block_size, enable_prefix_caching=enable_prefix_caching
            ),
            SwapSpace.none() if swap_space is None else swap_space,
            max_num_seqs=max_num_seqs,
        )
        self.limits = PoolLimits(
            num_slots=max_num_seqs, num_blocks=block_pool.num_blocks, block_size=block_size
        )
        self._admission = Admission(self.holdings, max_overtaking=max_num_seqs)
        self._preemption = Preemption(self.holdings)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` if it can never run; see `PoolLimits.check`."""
        self.limits.check(request)
        self.waiting.append(request)

    def schedule(self) -> ScheduledBatch:
        """Plan the next step. Everything planned before must have been launched."""
        batch = ScheduledBatch()
        # Steps up to the last one are launched, so what they write may be matched from now on.
        for request in self.running:
            self.tables.register(request)
        self._preemption.resume_swapped(batch)
        self._schedule_decodes(batch)
        self._continue_prefills(batch)
        if not batch.preempted:
            self._admit_waiting(batch)
        for row in batch.rows:
            row.request.num_computed_tokens += row.num_tokens
            if row.scored:
                row.request.num_scored_tokens = row.scored.stop
        for request in batch.sampled:
            request.num_in_flight_tokens += 1
        return batch

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside: the client has gone, or the engine fails."""
        if not request.is_finished:
            request.finish(reason)
            self.retire(request)

    def retire(self, request: Request) -> None:
        """Take everything from a finished request; see `Holdings.retire`."""
        self.holdings.retire(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Let the child go on from where the parent is, on the same blocks if it can run at once.

        It computes the last known token again, as its own next token is drawn from those logits.
        """
        is_running = parent.status is RequestStatus.RUNNING
        num_known = len(parent.token_ids) - 1
        # A parent that is computed again after a preemption writes blocks that it must not share.
        # Of a single token nothing is shared: the child would write it to the parent's block.
        is_decoding = is_running and 0 < num_known <= parent.num_computed_tokens
        if is_decoding and self.holdings.free_slots:
            self.holdings.run(child)
            self.tables.share(child, parent)
            child.num_computed_tokens = min(parent.num_computed_tokens, num_known)
            child.first_scheduled_time = time.monotonic()
        else:
            self.waiting.append(child)

    def reorder(self, beams: Sequence[Request], parents: Sequence[int]) -> None:
        """Beam i goes on as beam parents[i], on the same blocks."""
        self.tables.reorder(beams, parents)

    @property
    def waiting(self) -> WaitingQueue:
        return self.holdings.waiting

    @property
    def running(self) -> list[Request]:
        return self.holdings.running

    @property
    def tables(self) -> BlockTables:
        return self.holdings.tables

    @property
    def swap_space(self) -> SwapSpace:
        return self.holdings.swap_space

    @property
    def block_fill(self) -> float:
        """Share of the slots of held blocks that hold tokens, 0 to 1; 1 when none are held."""
        return self.tables.fill(self.running)

    @property
    def num_swapped(self) -> int:
        """Number of requests whose blocks are in host memory."""
        return self.swap_space.num_requests

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def check_writes(self, rows: Iterable[ScheduledRequest]) -> None:
        """Raise if a row of a step would write to a block that another request reads."""
        self.tables.check_writes(rows)

    def check_integrity(self) -> None:
        """Raise if a block or a slot is lost, doubled or held by a request that does not run."""
        self.holdings.check_integrity()

    def _schedule_decodes(self, batch: ScheduledBatch) -> None:
        for request in self._runnable(decoding=True):
            if self._preemption.grow(request, batch):
                start = request.num_computed_tokens
                batch.add_decode(ScheduledRequest(request, start, 1, is_sampled=True))

    def _continue_prefills(self, batch: ScheduledBatch) -> None:
        for request in self._runnable(decoding=False):
            self._schedule_chunk(request, batch)

    def _admit_waiting(self, batch: ScheduledBatch) -> None:
        while batch.num_tokens < self.max_num_batched_tokens:
            request = self._admission.start_next(batch)
            if request is None:
                break
            self._schedule_chunk(request, batch)

    def _runnable(self, *, decoding: bool) -> Iterator[Request]:
        """Running requests that have tokens to compute: one (decoding) or several.

        Evaluated while the caller goes on: a request that was preempted or has ended meanwhile
        is left out.
        """
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue
            if request.policy.waits_for_siblings and request.num_in_flight_tokens:
                continue
            remaining = request.num_tokens_to_compute
            is_single = remaining == 1 and request.num_computed_tokens > 0
            is_decoding = is_single and not request.needs_scores
            if remaining and is_decoding == decoding:
                yield request

    def _schedule_chunk(self, request: Request, batch: ScheduledBatch) -> None:
        """Compute as many tokens of a prompt as the step has room for."""
        budget = self.max_num_batched_tokens - batch.num_tokens
        start = request.num_computed_tokens
        # All that run may sample a token, so only prompts that are scored can use the logits up.
        num_logits = self.max_num_seqs - batch.num_outputs
        num_tokens = min(request.num_tokens_to_compute, budget)
        num_tokens = request.num_tokens_with_logits(num_tokens, num_logits)
        if num_tokens > 0:
            is_sampled = start + num_tokens == request.num_tokens
            scored = request.scores_of(start, num_tokens)
            row = ScheduledRequest(request, start, num_tokens, is_sampled, scored)
            batch.add_prefill(row)
            if is_sampled and start + num_tokens == request.num_prompt_tokens:
                self._fork_siblings(row, batch)

    def _fork_siblings(self, row: ScheduledRequest, batch: ScheduledBatch) -> None:
        """Start the answers that wait for the prompt on its blocks: it is computed once.

        The first to write to a shared block gets a copy of it. Siblings beyond the limits start
        later, as other requests do.
        """
        for sibling in row.request.siblings:
            has_blocks = self.block_pool.num_free > len(self.running)
            has_room = has_blocks or sibling.policy.waits_for_siblings
            has_logits = batch.num_outputs < self.max_num_seqs
            if not self.holdings.free_slots or not has_room or not has_logits:
                break
            if sibling.is_fresh:
                self.waiting.remove(sibling)
                self.holdings.run(sibling)
                self.tables.share(sibling, row.request)
                sibling.first_scheduled_time = time.monotonic()
                sibling.num_computed_tokens = row.request.num_prompt_tokens
                batch.add_fork(row, sibling)
