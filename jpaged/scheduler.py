"""Which requests run in a step, and how many tokens of each. Host side only: imports no JAX.

Continuous batching (Yu et al. 2022, Orca) with chunked prefill (Agrawal et al. 2024,
Sarathi-Serve): a step takes one token of every decoding request, then fills the token budget with
chunks of prompts. First come, first served; when blocks run out, the latest arrival is preempted
whole and recomputed later (Kwon et al. 2023, PagedAttention, section 4.5).

The scheduler runs one step ahead of what the host knows: it may schedule a token whose id only
the device has seen yet (`Request.num_in_flight_tokens`).
"""

import time
from collections import deque
from collections.abc import Iterator

from jpaged.block_pool import BlockPool
from jpaged.errors import RequestError
from jpaged.outputs import FinishReason
from jpaged.prefix_cache import PrefixCache
from jpaged.request import Request, RequestStatus
from jpaged.scheduled_batch import ScheduledBatch, ScheduledRequest


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
    ) -> None:
        self.block_pool = block_pool
        self.prefix_cache = (
            PrefixCache(block_pool, block_size=block_size) if enable_prefix_caching else None
        )
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = list(reversed(range(max_num_seqs)))

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` if the whole pool could not hold its prompt."""
        self.check_fits(request.num_prompt_tokens)
        self.waiting.append(request)

    def check_fits(self, num_prompt_tokens: int) -> None:
        # The token that the prompt's step samples needs no room unless it is computed in turn.
        needed, total = self._num_blocks(num_prompt_tokens), self.block_pool.num_blocks
        if needed > total:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens and needs {needed} KV blocks of "
                f"{self.block_size} tokens, but the whole pool has {total}. Shorten the prompt or "
                "start the engine with a larger KV cache.",
                param="prompt",
            )

    def schedule(self) -> ScheduledBatch:
        batch = ScheduledBatch()
        # Steps up to the last one are launched, so what they write may be matched from now on.
        for request in self.running:
            self._register_blocks(request)
        self._schedule_decodes(batch)
        self._continue_prefills(batch)
        if not batch.preempted:
            self._admit_waiting(batch)
        for row in batch.rows:
            row.request.num_computed_tokens += row.num_tokens
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
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        else:
            self.waiting.remove(request)

    def reorder(self, beams: list[Request], parents: list[int]) -> None:
        """Beam i goes on as beam parents[i]: it shares that one's blocks from now on.

        Beams beyond the parents hold nothing any more.
        """
        states = [
            (list(beam.block_ids), list(beam.block_digests), beam.num_registered_blocks)
            for beam in (beams[parent] for parent in parents)
        ]
        for beam in beams:
            self._register_blocks(beam)
        for block_ids, _, _ in states:
            self.block_pool.retain(block_ids)
        for beam in beams:
            self.block_pool.release(reversed(beam.block_ids))
            beam.block_ids = []
        for beam, state in zip(beams, states, strict=False):
            beam.block_ids, beam.block_digests, beam.num_registered_blocks = state

    @property
    def block_fill(self) -> float:
        """Share of the slots of held blocks that hold tokens, 0 to 1; 1 when none are held.

        A block that several requests hold counts once.
        """
        num_empty: dict[int, int] = {}
        for request in self.running:
            num_computed = request.num_computed_tokens
            for index in range(num_computed // self.block_size, len(request.block_ids)):
                filled = max(0, num_computed - index * self.block_size)
                block = request.block_ids[index]
                empty = min(num_empty.get(block, self.block_size), self.block_size - filled)
                num_empty[block] = empty
        num_slots = self.block_pool.num_used * self.block_size
        return 1 - sum(num_empty.values()) / num_slots if num_slots else 1.0

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def check_integrity(self) -> None:
        """Raise if a block or a slot is lost, doubled or held by nobody who runs."""
        self.block_pool.check_integrity(request.block_ids for request in self.running)
        slots = [request.slot for request in self.running]
        assert len(set(slots + self._free_slots)) == len(slots) + len(self._free_slots), (
            f"{slots=} {self._free_slots=}"
        )
        for request in self.waiting:
            assert not request.block_ids and request.slot is None, request.request_id

    def _schedule_decodes(self, batch: ScheduledBatch) -> None:
        for request in self._runnable(decoding=True):
            if self._grow(request, batch):
                start = request.num_computed_tokens
                batch.decodes.append(ScheduledRequest(request, start, 1, is_sampled=True))
                batch.num_tokens += 1

    def _continue_prefills(self, batch: ScheduledBatch) -> None:
        for request in self._runnable(decoding=False):
            self._schedule_chunk(request, batch)

    def _admit_waiting(self, batch: ScheduledBatch) -> None:
        """Start requests whose known tokens fit the pool now, strictly in order of arrival.

        Every running request may soon need one more block: leaving that many free keeps a
        newcomer from being preempted right after its prompt was computed.
        """
        while self.waiting and self._free_slots and batch.num_tokens < self.max_num_batched_tokens:
            request = self.waiting[0]
            if any(sibling.is_prefilling for sibling in request.siblings):
                break  # soon there is a prompt to share
            if len(self._free_slots) < self._num_slots_to_start(request):
                break
            cached = self.prefix_cache.match(request) if self.prefix_cache else []
            needed = self._num_blocks(request.num_tokens) - len(cached)
            num_free = self.block_pool.num_free - sum(map(self.block_pool.is_free, cached))
            headroom = len(self.running)
            if request.is_beam and self._is_alone(request):
                headroom = 0  # the others wait for this one
                if needed > num_free:
                    self._end_without_room(request, batch)
                    continue
            if self.running and needed + headroom > num_free:
                break
            self.waiting.popleft()
            self._start(request, cached, needed)
            self._schedule_chunk(request, batch)

    def _num_slots_to_start(self, request: Request) -> int:
        """Answers to one prompt start together, as far as they can, to share its blocks."""
        num_fresh = sum(sibling.is_fresh for sibling in request.siblings)
        return min(num_fresh, self.max_num_seqs) if request.is_fresh else 1

    def _start(self, request: Request, cached: list[int], num_new_blocks: int) -> None:
        """Run a request on blocks that hold its beginning already, and on new ones."""
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        self.block_pool.retain(cached)
        request.block_ids = cached + self.block_pool.allocate(num_new_blocks)
        request.num_computed_tokens = len(cached) * self.block_size
        request.num_registered_blocks = len(cached)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            # What a preempted request finds again later is no hit.
            request.num_cached_tokens = request.num_computed_tokens

    def _runnable(self, *, decoding: bool) -> Iterator[Request]:
        """Running requests that have tokens to compute: one (decoding) or several.

        Evaluated while the caller goes on: a request that was preempted or has ended meanwhile
        is left out.
        """
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue
            remaining = request.num_tokens - request.num_computed_tokens
            if request.is_beam and request.num_in_flight_tokens:
                continue  # waits until all beams of the search have reported
            is_decoding = remaining == 1 and request.num_computed_tokens > 0
            if remaining and is_decoding == decoding and not request.has_all_tokens_in_flight:
                yield request

    def _schedule_chunk(self, request: Request, batch: ScheduledBatch) -> None:
        budget = self.max_num_batched_tokens - batch.num_tokens
        start = request.num_computed_tokens
        num_tokens = min(request.num_tokens - start, budget)
        if num_tokens:
            is_sampled = start + num_tokens == request.num_tokens
            row = ScheduledRequest(request, start, num_tokens, is_sampled)
            batch.prefills.append(row)
            batch.num_tokens += num_tokens
            if is_sampled and start + num_tokens == request.num_prompt_tokens:
                self._fork_siblings(row)

    def _fork_siblings(self, row: ScheduledRequest) -> None:
        """The prompt is computed once: answers that wait for it start on the same blocks.

        Who writes to a shared block first gets a copy of it. Siblings beyond the limits start
        later, as other requests do.
        """
        for sibling in row.request.siblings:
            has_room = sibling.is_beam or self.block_pool.num_free > len(self.running)
            if not self._free_slots or not has_room:
                break
            if sibling.is_fresh:
                self.waiting.remove(sibling)
                self._start(sibling, row.request.block_ids, num_new_blocks=0)
                sibling.num_computed_tokens = row.request.num_prompt_tokens
                sibling.num_cached_tokens = sibling.num_registered_blocks = 0
                row.forks.append(sibling)

    def _grow(self, request: Request, batch: ScheduledBatch) -> bool:
        """Give the request a slot of its own for one more token: a new block, or a copy of one
        that it shares. Later arrivals are preempted if need be."""
        while self._num_blocks_to_grow(request) > self.block_pool.num_free:
            if self._is_alone(request) and (request.is_beam or len(self.running) == 1):
                self._end_without_room(request, batch)
                return False
            self._make_room(batch)
            if request.status is not RequestStatus.RUNNING:
                return False
        tail = request.num_computed_tokens // self.block_size
        if tail == len(request.block_ids):
            request.block_ids.extend(self.block_pool.allocate(1))
        elif self._is_shared(request.block_ids[tail]):
            self._copy_block(request, tail, batch)
        return True

    def _num_blocks_to_grow(self, request: Request) -> int:
        tail = request.num_computed_tokens // self.block_size
        return int(tail == len(request.block_ids) or self._is_shared(request.block_ids[tail]))

    def _is_shared(self, block: int) -> bool:
        return self.block_pool.reference_count(block) > 1

    def _copy_block(self, request: Request, index: int, batch: ScheduledBatch) -> None:
        """Copy on write. A new list: the table changes before its end."""
        [copy] = self.block_pool.allocate(1)
        shared = request.block_ids[index]
        batch.copies.append((shared, copy))
        request.block_ids = [*request.block_ids[:index], copy, *request.block_ids[index + 1 :]]
        self.block_pool.release([shared])

    def _is_alone(self, request: Request) -> bool:
        """Whether nobody runs but siblings of the request."""
        return all(other in request.siblings for other in self.running)

    def _make_room(self, batch: ScheduledBatch) -> None:
        """Preempt the latest arrival: all its siblings at once, unless nobody else runs."""
        latest = self.running[-1]
        victims = [request for request in self.running if request in latest.siblings]
        if len(victims) == len(self.running):
            victims = [latest]
        for victim in reversed(victims):
            self._preempt(victim, batch)

    def _preempt(self, request: Request, batch: ScheduledBatch) -> None:
        self.running.remove(request)
        self._release(request)
        self._unschedule(request, batch)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        batch.preempted.append(request)

    def _unschedule(self, request: Request, batch: ScheduledBatch) -> None:
        """A sibling of the one that needs room may have had its turn in this step already."""
        if any(row.request is request for row in batch.decodes):
            batch.decodes = [row for row in batch.decodes if row.request is not request]
            batch.num_tokens -= 1

    def _end_without_room(self, request: Request, batch: ScheduledBatch) -> None:
        """Nobody is left to preempt: the answer ends with the tokens that are on their way.

        Beams end together, as they only go on together; they have no tokens on their way.
        """
        if request.is_beam:
            for sibling in [each for each in request.siblings if not each.is_finished]:
                self._unschedule(sibling, batch)
                sibling.num_in_flight_tokens = 0
                sibling.finish(FinishReason.LENGTH)
                self.retire(sibling)
                batch.finished.append(sibling)
            return
        request.max_tokens = request.num_tokens - request.num_prompt_tokens
        if not request.num_in_flight_tokens:
            request.finish(FinishReason.LENGTH)
            self.retire(request)
            batch.finished.append(request)

    def _release(self, request: Request) -> None:
        assert request.slot is not None
        self._register_blocks(request)
        # Tails first, to be evicted first: a head is of use without its tail, not the reverse.
        self.block_pool.release(reversed(request.block_ids))
        request.block_ids = []
        request.num_registered_blocks = 0
        self._free_slots.append(request.slot)
        request.slot = None

    def _register_blocks(self, request: Request) -> None:
        if self.prefix_cache is not None:
            self.prefix_cache.register(request)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
