"""Which requests run in a step, and how many tokens of each. Host side only: imports no JAX.

Continuous batching (Yu et al. 2022, Orca) with chunked prefill (Agrawal et al. 2024,
Sarathi-Serve): a step takes one token of every decoding request, then fills the token budget with
chunks of prompts. First come, first served; when blocks run out, the latest arrival is preempted
whole, and computed again or swapped in later (Kwon et al. 2023, PagedAttention, section 4.5).

The scheduler runs one step ahead of what the host knows: it may schedule a token whose id only
the device has seen yet (`Request.num_in_flight_tokens`).
"""

import time
from collections.abc import Iterator, Sequence

from jpaged.errors import RequestError
from jpaged.outputs import FinishReason
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.block_tables import BlockTables
from jpaged.scheduling.prefix_cache import PrefixMatch
from jpaged.scheduling.request import Request, RequestStatus
from jpaged.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest
from jpaged.scheduling.shortage import Shortage
from jpaged.scheduling.sibling_blocks import is_sharing_soon, shared_blocks
from jpaged.scheduling.swap import SwapIn, SwapSpace
from jpaged.scheduling.waiting_queue import WaitingQueue


class Scheduler:
    """waiting is in order of arrival, and so is running: everyone who runs arrived earlier."""

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
        self.tables = BlockTables(
            block_pool, block_size=block_size, enable_prefix_caching=enable_prefix_caching
        )
        self.swap_space = SwapSpace.none() if swap_space is None else swap_space
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._shortage: Shortage | None = None

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` if the whole pool could not hold its prompt."""
        self.check_fits(request.num_prompt_tokens)
        self.waiting.append(request)

    def check_fits(self, num_prompt_tokens: int) -> None:
        # The token that the prompt's step samples needs no room unless it is computed in turn.
        needed, total = self.tables.num_blocks(num_prompt_tokens), self.block_pool.num_blocks
        if needed > total:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens and needs {needed} KV blocks of "
                f"{self.tables.block_size} tokens, but the whole pool has {total}. Shorten the "
                "prompt or start the engine with a larger KV cache.",
                param="prompt",
            )

    def schedule(self) -> ScheduledBatch:
        batch = ScheduledBatch()
        # Steps up to the last one are launched, so what they write may be matched from now on.
        for request in self.running:
            self.tables.register(request)
        self._resume_swapped(batch)
        self._schedule_decodes(batch)
        self._continue_prefills(batch)
        if not batch.preempted:
            self._admit_waiting(batch)
        for row in batch.rows:
            row.request.num_computed_tokens += row.num_tokens
            if row.scored:
                row.request.num_scored_tokens = row.scored.stop
        for request, _ in batch.sampled:
            request.num_in_flight_tokens += 1
        return batch

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside: the client has gone, or the engine fails."""
        if not request.is_finished:
            request.finish(reason)
            self.retire(request)

    def retire(self, request: Request) -> None:
        """Give back what a finished request holds, or its place in the queue if it was preempted.

        Steps that may still write its blocks have been launched, and the device runs steps in
        order: whoever gets the blocks next writes them later.
        """
        if request.slot is not None:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)
            self.swap_space.drop(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Let the child go on from where the parent is, on the same blocks if it can run at once.

        It computes the last known token again, as its own next token is drawn from those logits.
        """
        is_running = parent.status is RequestStatus.RUNNING
        # A parent that is computed again after a preemption writes blocks that it must not share.
        is_decoding = is_running and parent.num_computed_tokens >= len(parent.token_ids) - 1
        if is_decoding and self._free_slots:
            self._run(child)
            self.tables.share(child, parent)
            num_known = len(child.token_ids) - 1
            child.num_computed_tokens = min(parent.num_computed_tokens, num_known)
            child.first_scheduled_time = time.monotonic()
        else:
            self.waiting.append(child)

    def reorder(self, beams: Sequence[Request], parents: Sequence[int]) -> None:
        """Beam i goes on as beam parents[i], on the same blocks."""
        self.tables.reorder(beams, parents)

    @property
    def block_fill(self) -> float:
        """Share of the slots of held blocks that hold tokens, 0 to 1; 1 when none are held."""
        return self.tables.fill(self.running)

    @property
    def num_swapped(self) -> int:
        """Requests whose blocks are in host memory."""
        return self.swap_space.num_requests

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def check_integrity(self) -> None:
        """Raise if a block or a slot is lost, doubled or held by nobody who runs."""
        self.tables.check_integrity(self.running)
        slots = [request.slot for request in self.running]
        assert len(set(slots + self._free_slots)) == len(slots) + len(self._free_slots), (
            f"{slots=} {self._free_slots=}"
        )
        for request in self.waiting:
            assert not request.block_ids and request.slot is None, request.request_id
        self.swap_space.check_integrity(self.waiting)

    def _schedule_decodes(self, batch: ScheduledBatch) -> None:
        for request in self._runnable(decoding=True):
            if self._grow(request, batch):
                start = request.num_computed_tokens
                batch.add_decode(ScheduledRequest(request, start, 1, is_sampled=True))

    def _continue_prefills(self, batch: ScheduledBatch) -> None:
        for request in self._runnable(decoding=False):
            self._schedule_chunk(request, batch)

    def _admit_waiting(self, batch: ScheduledBatch) -> None:
        """Start requests whose known tokens fit the pool now, strictly in order of arrival.

        Every running request may soon need one more block: leaving that many free keeps a
        newcomer from being preempted right after its prompt was computed.
        """
        while self.waiting and self._free_slots and batch.num_tokens < self.max_num_batched_tokens:
            request = self.waiting.first
            if request.swapped is not None:
                break
            if not request.policy.generates and not request.num_tokens_to_compute:
                self._end_without_work(request, batch)
                continue
            if is_sharing_soon(request, self.tables.block_size):
                break
            # Siblings that cannot go on without this request need no room meanwhile.
            is_awaited = request.policy.waits_for_siblings and self._is_alone(request)
            headroom = 0 if is_awaited else len(self.running)
            if self._is_known_to_lack_blocks(request, headroom):
                break
            match = self._match(request)
            needed = self.tables.num_new_blocks(request, match)
            num_missing = needed + headroom - self.tables.num_free_besides(match)
            if is_awaited and num_missing > 0:
                self._end_without_room(request, batch)
                continue
            if self.running and num_missing > 0:
                self._note_shortage(request, num_missing, headroom)
                break
            self.waiting.popleft()
            self._start(request, match, batch)
            self._schedule_chunk(request, batch)

    def _match(self, request: Request) -> PrefixMatch:
        """Find the beginning of the request in the prefix cache, or with siblings that run."""
        match = self.tables.match(request)
        if request.needs_scores:
            return match  # siblings have no log-probabilities of the prompt
        blocks = shared_blocks(request, self.tables.block_size)
        num_tokens = len(blocks) * self.tables.block_size
        return (
            PrefixMatch(blocks, num_tokens=num_tokens) if num_tokens > match.num_tokens else match
        )

    def _is_known_to_lack_blocks(self, request: Request, headroom: int) -> bool:
        shortage = self._shortage
        return shortage is not None and shortage.persists(
            request, self.block_pool, headroom=headroom
        )

    def _note_shortage(self, request: Request, num_missing: int, headroom: int) -> None:
        self._shortage = Shortage(
            request,
            num_tokens=request.num_tokens,
            num_missing=num_missing,
            num_freed=self.block_pool.num_freed,
            headroom=headroom,
        )

    def _start(self, request: Request, match: PrefixMatch, batch: ScheduledBatch) -> None:
        """Run a request on blocks that hold its beginning already, and on new ones."""
        self._run(request)
        self.tables.start(request, match, batch.copies)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            # What a preempted request finds again later is no hit.
            request.num_cached_tokens = self.tables.num_reported(request.num_computed_tokens)
            batch.num_hidden_tokens += request.num_computed_tokens - request.num_cached_tokens

    def _run(self, request: Request) -> None:
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()

    def _resume_swapped(self, batch: ScheduledBatch) -> None:
        """Bring back requests from host memory: all that left together, unless nobody else runs.

        Everyone keeps room to grow, so nobody is preempted in the same step, before the blocks
        have come back.
        """
        while self.waiting and (swapped := self.waiting.first.swapped) is not None:
            siblings = list(swapped.tables)  # in the order of the queue
            fitting = siblings[: self._num_fitting(siblings)]
            has_others = bool(self.running) and not self._is_awaited(siblings[0])
            if not fitting and not has_others:
                self._end_without_room(siblings[0], batch)
                continue
            if not fitting or (has_others and len(fitting) < len(siblings)):
                break
            targets: list[int | None] = [None] * swapped.num_blocks
            for request in fitting:
                self.waiting.remove(request)
                known = self._known_blocks(request)
                self._run(request)
                self.tables.restore(request, swapped.tables[request], targets, known)
                self.swap_space.drop(request)
            batch.swap_ins.append(SwapIn(swapped, targets))

    def _num_fitting(self, siblings: Sequence[Request]) -> int:
        """How many of the requests, in order, have room to come back and to grow."""
        num_others = 0 if self._is_awaited(siblings[0]) else len(self.running)
        placed: set[int] = set()
        num_new = 0
        for count, request in enumerate(siblings, 1):
            assert request.swapped is not None
            table = request.swapped.tables[request]
            num_held = sum(map(self.tables.is_held, self._known_blocks(request)))
            placed.update(table[num_held:])
            num_new += self.tables.num_blocks(request.num_tokens) - len(table)
            # One that comes alone has its next slot among its new blocks.
            headroom = num_others + (count if num_others or count > 1 else 0)
            is_too_much = len(placed) + num_new + headroom > self.block_pool.num_free
            if count > len(self._free_slots) or is_too_much:
                return count - 1
        return len(siblings)

    def _known_blocks(self, request: Request) -> list[int]:
        """Blocks of the pool that have the beginning of what a swapped request had computed."""
        return self._match(request).blocks[: request.num_computed_tokens // self.tables.block_size]

    def _is_awaited(self, request: Request) -> bool:
        """Whether all who run are beams that wait for this one."""
        return request.policy.waits_for_siblings and bool(self.running) and self._is_alone(request)

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
        budget = self.max_num_batched_tokens - batch.num_tokens
        start = request.num_computed_tokens
        # All who run may sample a token, so only prompts that are scored can use the logits up.
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
        """The prompt is computed once: answers that wait for it start on the same blocks.

        Who writes to a shared block first gets a copy of it. Siblings beyond the limits start
        later, as other requests do.
        """
        for sibling in row.request.siblings:
            has_room = sibling.policy.waits_for_siblings or self.block_pool.num_free > len(
                self.running
            )
            has_logits = batch.num_outputs < self.max_num_seqs
            if not self._free_slots or not has_room or not has_logits:
                break
            if sibling.is_fresh:
                self.waiting.remove(sibling)
                self._run(sibling)
                self.tables.share(sibling, row.request)
                sibling.first_scheduled_time = time.monotonic()
                sibling.num_computed_tokens = row.request.num_prompt_tokens
                batch.add_fork(row, sibling)

    def _grow(self, request: Request, batch: ScheduledBatch) -> bool:
        """Give the request a slot of its own for one more token. Later arrivals are preempted if
        need be."""
        while self.tables.num_blocks_to_grow(request) > self.block_pool.num_free:
            if self._is_alone(request) and (request.policy.ends_together or len(self.running) == 1):
                self._end_without_room(request, batch)
                return False
            self._make_room(batch)
            if request.status is not RequestStatus.RUNNING:
                return False
        self.tables.grow(request, batch.copies)
        return True

    def _is_alone(self, request: Request) -> bool:
        """Whether nobody runs but siblings of the request."""
        return all(other.siblings is request.siblings for other in self.running)

    def _make_room(self, batch: ScheduledBatch) -> None:
        """Preempt the latest arrival: all its siblings at once, unless nobody else runs."""
        latest = self.running[-1]
        victims = [request for request in self.running if request in latest.siblings]
        if len(victims) == len(self.running):
            victims = [latest]
        self._swap_out(victims, batch)
        for victim in reversed(victims):
            self._preempt(victim, batch)

    def _swap_out(self, victims: Sequence[Request], batch: ScheduledBatch) -> None:
        """Move what the victims have computed to host memory, if that is the cheaper way."""
        assert not batch.swap_ins, "whoever comes back has room for all"
        for victim in victims:
            if victim.policy.report_is_repeatable:
                computed = min(victim.num_computed_tokens, len(victim.token_ids) - 1)
                victim.num_computed_tokens = computed
        tables = {victim: self.tables.written(victim, batch.copies) for victim in victims}
        num_blocks = len({block for table in tables.values() for block in table})
        num_tokens = min(
            num_blocks * self.tables.block_size,
            sum(victim.num_computed_tokens for victim in victims),
        )
        if self.swap_space.takes(num_tokens=num_tokens, num_blocks=num_blocks):
            batch.swap_outs.append(self.swap_space.put(tables))

    def _preempt(self, request: Request, batch: ScheduledBatch) -> None:
        self.running.remove(request)
        self._unschedule(request, batch)
        self._release(request)
        if request.swapped is None:
            request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.append_first(request)
        batch.preempted.append(request)

    def _unschedule(self, request: Request, batch: ScheduledBatch) -> None:
        """A sibling of the one that needs room may have had its turn in this step already, and
        may have got a copy of a block, which somebody else may get now."""
        held = set(request.block_ids)
        batch.copies = [copy for copy in batch.copies if copy[1] not in held]
        batch.drop_rows(request)

    def _end_without_room(self, request: Request, batch: ScheduledBatch) -> None:
        """Nobody is left to preempt: the answer ends with the tokens that are on their way.

        Beams end together, as they only go on together; they have no tokens on their way.
        """
        if request.policy.ends_together:
            for sibling in [each for each in request.siblings if not each.is_finished]:
                self._unschedule(sibling, batch)
                sibling.num_in_flight_tokens = 0
                sibling.finish(FinishReason.LENGTH)
                self.retire(sibling)
                batch.finished.append(sibling)
            return
        request.token_limit = request.num_tokens - request.num_prompt_tokens
        if not request.num_in_flight_tokens:
            request.finish(FinishReason.LENGTH)
            self.retire(request)
            batch.finished.append(request)

    def _end_without_work(self, request: Request, batch: ScheduledBatch) -> None:
        """A prompt of one token, to be scored: there is nothing to compute."""
        request.finish(FinishReason.LENGTH)
        self.retire(request)
        batch.finished.append(request)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self.tables.release(request)
        self._free_slots.append(request.slot)
        request.slot = None
