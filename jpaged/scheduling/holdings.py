"""The requests in the scheduler and what each of them holds. Host side only: imports no JAX."""

from jpaged.outputs import FinishReason
from jpaged.scheduling.block_tables import BlockTables
from jpaged.scheduling.prefix_cache import PrefixMatch
from jpaged.scheduling.request import Request, RequestStatus
from jpaged.scheduling.scheduled_batch import ScheduledBatch
from jpaged.scheduling.sibling_blocks import shared_blocks
from jpaged.scheduling.swap import SwapSpace
from jpaged.scheduling.waiting_queue import WaitingQueue


class Holdings:
    """Keeps places in the queue, slots and blocks of requests in step with each other.

    A waiting request holds a place in the queue, and host memory if it was swapped out. A running
    one holds a slot of the device's arrays, and blocks. `waiting` is in order of arrival and
    `running` in order of start; these orders differ only where requests have overtaken a search.
    """

    def __init__(self, tables: BlockTables, swap_space: SwapSpace, *, max_num_seqs: int) -> None:
        self.tables = tables
        self.swap_space = swap_space
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.free_slots = list(reversed(range(max_num_seqs)))

    def run(self, request: Request) -> None:
        """Give the request a slot. The caller takes it from the queue and gives it blocks."""
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.slot = self.free_slots.pop()

    def release(self, request: Request) -> None:
        """Take slot and blocks from a running request."""
        self.running.remove(request)
        self.tables.release(request)
        self.free_slots.append(request.running_slot)
        request.slot = None

    def retire(self, request: Request) -> None:
        """Take everything from a finished request, whether it ran or waited.

        Steps that may still write its blocks have been launched, and the device runs steps in
        order: the next holder of the blocks writes them later.
        """
        if request.slot is not None:
            self.release(request)
        else:
            self.waiting.remove(request)
            self.swap_space.drop(request)

    def match(self, request: Request) -> PrefixMatch:
        """Find the beginning of the request in the prefix cache, or with siblings that run."""
        match = self.tables.match(request)
        if request.needs_scores:
            return match  # siblings have no log-probabilities of the prompt
        blocks = shared_blocks(request, self.tables.block_size)
        num_tokens = len(blocks) * self.tables.block_size
        if num_tokens <= match.num_tokens:
            return match
        return PrefixMatch(blocks, num_tokens=num_tokens)

    def is_alone(self, request: Request) -> bool:
        """Whether no request runs but siblings of this one."""
        return all(other.group is request.group for other in self.running)

    def is_awaited(self, request: Request) -> bool:
        """Whether all that run are siblings that cannot go on without this request."""
        return request.policy.waits_for_siblings and bool(self.running) and self.is_alone(request)

    def awaited(self) -> Request | None:
        """The first waiting beam of the only search that runs, which cannot go on without it."""
        if not self.running or not self.is_awaited(self.running[0]):
            return None
        siblings = self.running[0].siblings
        return next((each for each in siblings if each.status is RequestStatus.WAITING), None)

    def end_without_room(self, request: Request, batch: ScheduledBatch) -> None:
        """End a request of which the whole pool cannot hold any more.

        The answer has the tokens that are known and those in flight. Siblings that only go on
        together end together, and have none in flight.
        """
        if request.policy.ends_together:
            for sibling in [each for each in request.siblings if not each.is_finished]:
                self.unschedule(sibling, batch)
                sibling.num_in_flight_tokens = 0
                self.end(sibling, batch)
            return
        request.token_limit = request.num_tokens - request.num_prompt_tokens
        if not request.num_in_flight_tokens:
            self.end(request, batch)

    def end(self, request: Request, batch: ScheduledBatch) -> None:
        """End a request that has nothing more to compute."""
        request.finish(FinishReason.LENGTH)
        self.retire(request)
        batch.finished.append(request)

    def unschedule(self, request: Request, batch: ScheduledBatch) -> None:
        """Compute nothing of a running request in the step that is being planned.

        It may have had its turn already and have got a copy of a block, which may be given to
        another request now.
        """
        held = set(request.block_ids)
        batch.copies = [copy for copy in batch.copies if copy[1] not in held]
        batch.drop_rows(request)

    def check_integrity(self) -> None:
        """Raise if a block or a slot is lost, doubled or held by a request that does not run."""
        self.tables.check_integrity(self.running)
        slots = [request.slot for request in self.running]
        assert len(set(slots + self.free_slots)) == len(slots) + len(self.free_slots), (
            f"{slots=} {self.free_slots=}"
        )
        for request in self.waiting:
            assert not request.block_ids and request.slot is None, request.request_id
        self.swap_space.check_integrity(self.waiting)
