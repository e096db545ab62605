"""Which waiting request starts next. Host side only: imports no JAX."""

import time

from jpaged.scheduling.holdings import Holdings
from jpaged.scheduling.prefix_cache import PrefixMatch
from jpaged.scheduling.request import Request, RequestStatus
from jpaged.scheduling.request_group import RequestGroup
from jpaged.scheduling.scheduled_batch import ScheduledBatch
from jpaged.scheduling.shortage import ShortageMemo
from jpaged.scheduling.sibling_blocks import is_sharing_soon


class Admission:
    """Starts requests in order of arrival, each once its known tokens fit the pool.

    Every running request may soon need one more block: leaving that many free keeps a newcomer
    from being preempted right after its prompt was computed.

    Sequences that only go on together, the beams of a search, start together. A search that waits
    for slots or blocks for all of them leaves both to younger requests. As many of these as there
    are slots may overtake it, and then no more start before it: so it runs at the latest when all
    others have ended.
    """

    def __init__(self, holdings: Holdings, *, max_overtaking: int) -> None:
        self._holdings = holdings
        block_pool = holdings.tables.block_pool
        self._shortage = ShortageMemo(block_pool)
        self._search_shortage = ShortageMemo(block_pool)
        self._max_overtaking = max_overtaking
        self._overtaken: RequestGroup | None = None
        self._num_overtaking = 0

    def start_next(self, batch: ScheduledBatch) -> Request | None:
        """Run the next waiting request and return it, or None if it has to wait.

        A request that can never run, or has nothing to compute, ends instead.
        """
        holdings = self._holdings
        while holdings.free_slots and (request := self._next()) is not None:
            if request.swapped is not None:
                return None
            if not request.policy.generates and not request.num_tokens_to_compute:
                holdings.end(request, batch)
                continue
            # Siblings that cannot go on without this request need no room meanwhile.
            is_awaited = request.policy.waits_for_siblings and holdings.is_alone(request)
            headroom = 0 if is_awaited else len(holdings.running)
            key = request, request.num_tokens
            if not is_awaited and self._shortage.persists(key, headroom=headroom):
                return None
            if is_sharing_soon(request, holdings.tables.block_size):
                return None
            match = self._fitting_match(request, headroom)
            if match is None and is_awaited:
                holdings.end_without_room(request, batch)
                continue
            if match is not None:
                self._start(request, match, batch)
                return request
            return None
        return None

    def _next(self) -> Request | None:
        """The first in the queue, or the first behind a search that has to wait for room.

        A beam that the only search which runs waits for comes first: nothing else would end that
        search, whose place requests that arrived before it may need.
        """
        waiting = self._holdings.waiting
        if (awaited := self._holdings.awaited()) is not None:
            return awaited
        if not waiting or not self._lacks_room_for_all(waiting.first):
            return waiting.first if waiting else None
        search = waiting.first.group
        if search is not self._overtaken:
            self._overtaken, self._num_overtaking = search, 0
        if self._num_overtaking >= self._max_overtaking:
            return None
        behind = next((request for request in waiting if request.group is not search), None)
        # Two searches that have begun, each with beams that wait for slots, would wait for ever.
        is_search = behind is not None and behind.policy.waits_for_siblings
        return None if is_search else behind

    def _lacks_room_for_all(self, request: Request) -> bool:
        """Whether a beam, to be computed from its beginning, has to wait until all have room."""
        holdings, tables = self._holdings, self._holdings.tables
        waits = request.policy.waits_for_siblings and request.swapped is None
        if not waits or holdings.is_alone(request):
            return False
        beams = [each for each in request.siblings if not each.is_finished]
        if any(each.status is RequestStatus.RUNNING for each in beams):
            return False
        if len(beams) > len(holdings.free_slots):
            return True
        headroom = len(holdings.running)
        key = request, sum(each.num_tokens for each in beams)
        if self._search_shortage.persists(key, headroom=headroom):
            return True
        # The first beam computes the prompt, or finds it; the others share its full blocks. Those
        # that were preempted are computed again one by one, and leave room for each other to grow.
        match = holdings.match(request)
        num_shared = request.num_prompt_tokens // tables.block_size
        needed = num_shared - len(match.blocks)
        for beam in beams:
            is_fresh = beam.num_tokens == beam.num_prompt_tokens
            num_ahead = 1 if is_fresh else tables.block_size
            needed += tables.num_blocks(beam.num_tokens + num_ahead) - num_shared
        num_missing = needed + headroom - tables.num_free_besides(match)
        if num_missing > 0:
            self._search_shortage.note(key, num_missing=num_missing, headroom=headroom)
        return num_missing > 0

    def _fitting_match(self, request: Request, headroom: int) -> PrefixMatch | None:
        """What the request need not compute, or None if the pool lacks blocks for the rest."""
        holdings = self._holdings
        match = holdings.match(request)
        needed = holdings.tables.num_new_blocks(request, match)
        num_missing = needed + headroom - holdings.tables.num_free_besides(match)
        # The prompt was checked to fit the pool, so a request without others fits.
        is_alone = not holdings.running and not request.policy.waits_for_siblings
        if num_missing <= 0 or is_alone:
            return match
        key = request, request.num_tokens
        self._shortage.note(key, num_missing=num_missing, headroom=headroom)
        return None

    def _start(self, request: Request, match: PrefixMatch, batch: ScheduledBatch) -> None:
        """Run a request on blocks that hold its beginning already, and on new ones."""
        holdings = self._holdings
        if request is not holdings.waiting.first and not request.policy.waits_for_siblings:
            self._num_overtaking += 1
        holdings.waiting.remove(request)
        holdings.run(request)
        holdings.tables.start(request, match, batch.copies)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            # What a preempted request finds again later is no hit.
            request.num_cached_tokens = holdings.tables.num_reported(request.num_computed_tokens)
            batch.num_hidden_tokens += request.num_computed_tokens - request.num_cached_tokens
