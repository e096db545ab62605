"""The block tables of running requests as one array, with a row for each slot."""

from collections.abc import Iterable

import numpy as np

from jpaged.scheduling.scheduled_batch import ScheduledRequest


class SlotTables:
    """Host copies of block tables, which are packed into the input of a step.

    array: int32, [slots, blocks of the longest context]. Behind the blocks of its request, a row
        holds anything.
    """

    def __init__(self, num_slots: int, num_table_blocks: int) -> None:
        self.array = np.zeros((num_slots, num_table_blocks), np.int32)
        # What each row of the array shows: a request's list, and how much of it.
        self._shown: list[tuple[list[int], int]] = [([], 0)] * num_slots

    def update(self, rows: Iterable[ScheduledRequest]) -> None:
        """Copy what is new of each request's block table into the row of its slot.

        A request that starts, or whose table changes before its end, has a new list; otherwise a
        list only grows.
        """
        for row in rows:
            slot, block_ids = row.request.running_slot, row.request.block_ids
            shown, num_shown = self._shown[slot]
            known = num_shown if shown is block_ids else 0
            if known != len(block_ids):
                self.array[slot, known : len(block_ids)] = block_ids[known:]
                self._shown[slot] = (block_ids, len(block_ids))
