"""Which waiting request starts next. Host side only: imports no JAX."""

import time

from jpaged.scheduling.holdings import Holdings
from jpaged.scheduling.prefix_cache import PrefixMatch
from jpaged.scheduling.request import Request
from jpaged.scheduling.scheduled_batch import ScheduledBatch
from jpaged.scheduling.shortage import ShortageMemo
from jpaged.scheduling.sibling_blocks import is_sharing_soon


class Admission:
    """Starts requests strictly in order of arrival, each once its known tokens fit the pool.

    Every running request may soon need one more block: leaving that many free keeps a newcomer
    from being preempted right after its prompt was computed.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._shortage = ShortageMemo(holdings.tables.block_pool)

    def start_next(self, batch: ScheduledBatch) -> Request | None:
        """Run the first waiting request and return it, or None if it has to wait.

        A request that can never run, or has nothing to compute, ends instead.
        """
        holdings = self._holdings
        while holdings.waiting and holdings.free_slots:
            request = holdings.waiting.first
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
        holdings.waiting.popleft()
        holdings.run(request)
        holdings.tables.start(request, match, batch.copies)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.monotonic()
            # What a preempted request finds again later is no hit.
            request.num_cached_tokens = holdings.tables.num_reported(request.num_computed_tokens)
            batch.num_hidden_tokens += request.num_computed_tokens - request.num_cached_tokens
