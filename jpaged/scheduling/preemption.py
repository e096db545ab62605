"""Which requests give up their blocks, and how they come back. Host side only: imports no JAX.

When blocks run out, the latest arrival is preempted whole, and computed again or swapped in later
(Kwon et al. 2023, PagedAttention, section 4.5).
"""

import weakref
from collections.abc import Iterator, Sequence

from jpaged.scheduling.holdings import Holdings
from jpaged.scheduling.request import Request, RequestStatus, SwappedBlocks
from jpaged.scheduling.scheduled_batch import ScheduledBatch
from jpaged.scheduling.shortage import ShortageMemo
from jpaged.scheduling.swap import SwapIn


class Preemption:
    """Takes blocks from requests that arrived last, for those that arrived first."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._shortage = ShortageMemo(holdings.tables.block_pool)

    def grow(self, request: Request, batch: ScheduledBatch) -> bool:
        """Give the request a slot of its own for one more token, preempting others if need be.

        Returns False if it ended or was preempted itself.
        """
        holdings, tables = self._holdings, self._holdings.tables
        while tables.num_blocks_to_grow(request) > tables.block_pool.num_free:
            is_last = request.policy.ends_together or len(holdings.running) == 1
            if is_last and holdings.is_alone(request):
                holdings.end_without_room(request, batch)
                return False
            self._make_room(batch)
            if request.status is not RequestStatus.RUNNING:
                return False
        tables.grow(request, batch.copies)
        return True

    def resume_swapped(self, batch: ScheduledBatch) -> None:
        """Bring back requests from host memory: all that left together, unless no other runs.

        Each keeps room to grow, so none is preempted in the same step, before its blocks have
        come back.
        """
        holdings = self._holdings
        while holdings.waiting:
            swapped = (holdings.awaited() or holdings.waiting.first).swapped
            if swapped is None:
                break
            siblings = list(swapped.tables)  # in the order of the queue
            if holdings.running and not holdings.is_awaited(siblings[0]):
                if not self._all_fit(swapped):
                    break
                self._bring_back(siblings, batch)
            elif num_fitting := self._num_fitting(siblings):
                self._bring_back(siblings[:num_fitting], batch)
            else:
                holdings.end_without_room(siblings[0], batch)

    def _bring_back(self, requests: Sequence[Request], batch: ScheduledBatch) -> None:
        """Run requests that left together on new blocks, and on those that others still share."""
        holdings, swapped = self._holdings, requests[0].swapped
        assert swapped is not None
        targets: list[int | None] = [None] * swapped.num_blocks
        for request in requests:
            known = self._known_blocks(request)
            holdings.waiting.remove(request)
            holdings.run(request)
            holdings.tables.restore(request, swapped.tables[request], targets, known)
            holdings.swap_space.drop(request)
        batch.swap_ins.append(SwapIn(swapped, targets))

    def _all_fit(self, swapped: SwappedBlocks) -> bool:
        """Whether all requests that left together have room beside others that run."""
        holdings = self._holdings
        headroom = len(holdings.running)
        if len(swapped.tables) > len(holdings.free_slots):
            return False
        # Weak, as the content in host memory goes with the last who refers to it.
        key = weakref.ref(swapped), sum(request.num_tokens for request in swapped.tables)
        if self._shortage.persists(key, headroom=headroom):
            return False
        *_, needed = self._needed_blocks(list(swapped.tables))
        num_missing = needed + len(swapped.tables) + headroom - holdings.tables.block_pool.num_free
        if num_missing > 0:
            self._shortage.note(key, num_missing=num_missing, headroom=headroom)
        return num_missing <= 0

    def _num_fitting(self, siblings: Sequence[Request]) -> int:
        """How many of the requests, in order, have room when no other request runs."""
        num_free = self._holdings.tables.block_pool.num_free
        num_fitting = 0
        for count, needed in enumerate(self._needed_blocks(siblings), 1):
            # One that comes alone has its next slot among its new blocks.
            headroom = count if count > 1 else 0
            if count > len(self._holdings.free_slots) or needed + headroom > num_free:
                break
            num_fitting = count
        return num_fitting

    def _needed_blocks(self, siblings: Sequence[Request]) -> Iterator[int]:
        """Yield how many free blocks the first, the first two... of the requests need at once.

        Room to grow is not counted in.
        """
        tables = self._holdings.tables
        placed: set[int] = set()
        num_new = 0
        for request in siblings:
            assert request.swapped is not None
            table = request.swapped.tables[request]
            num_held = sum(map(tables.is_held, self._known_blocks(request)))
            placed.update(table[num_held:])
            num_new += tables.num_blocks(request.num_tokens) - len(table)
            yield len(placed) + num_new

    def _known_blocks(self, request: Request) -> list[int]:
        """Blocks of the pool that have the beginning of what a swapped request had computed."""
        num_blocks = request.num_computed_tokens // self._holdings.tables.block_size
        return self._holdings.match(request).blocks[:num_blocks]

    def _make_room(self, batch: ScheduledBatch) -> None:
        """Preempt the latest arrival: all its siblings at once, unless no other request runs."""
        running = self._holdings.running
        latest = running[-1]
        victims = [request for request in running if request.group is latest.group]
        if len(victims) == len(running):
            victims = [latest]
        self._swap_out(victims, batch)
        for victim in reversed(victims):
            self._preempt(victim, batch)

    def _swap_out(self, victims: Sequence[Request], batch: ScheduledBatch) -> None:
        """Move what the victims have computed to host memory, if that is the cheaper way."""
        assert not batch.swap_ins, "requests that come back have room for all"
        tables, swap_space = self._holdings.tables, self._holdings.swap_space
        for victim in victims:
            if victim.policy.report_is_repeatable:
                computed = min(victim.num_computed_tokens, len(victim.token_ids) - 1)
                victim.num_computed_tokens = computed
        written = {victim: tables.written(victim, batch.copies) for victim in victims}
        num_blocks = len({block for table in written.values() for block in table})
        num_tokens = min(
            num_blocks * tables.block_size,
            sum(victim.num_computed_tokens for victim in victims),
        )
        if swap_space.takes(num_tokens=num_tokens, num_blocks=num_blocks):
            batch.swap_outs.append(swap_space.put(written))

    def _preempt(self, request: Request, batch: ScheduledBatch) -> None:
        holdings = self._holdings
        holdings.unschedule(request, batch)
        holdings.release(request)
        if request.swapped is None:
            request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        holdings.waiting.append_first(request)
        batch.preempted.append(request)
