"""Which blocks nobody may read: tests fill them with what would show."""

from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.scheduled_batch import ScheduledBatch


class Poison:
    """Watches a pool from now on."""

    def __init__(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool
        self._allocated: set[int] = set()
        allocate = block_pool.allocate

        def watched_allocate(count: int) -> list[int]:
            blocks = allocate(count)
            self._allocated.update(blocks)
            return blocks

        block_pool.allocate = watched_allocate

    def unreadable(self, batch: ScheduledBatch) -> list[int]:
        """Blocks handed out since the last call, and free ones of no known content; but not those
        that the batch copies from, as one may be handed out in the very step that copies it."""
        pool = self._block_pool
        free = {
            block
            for block in range(1, pool.num_blocks + 1)
            if pool.is_free(block) and pool.digest(block) is None
        }
        unreadable = (free | self._allocated) - {source for source, _ in batch.copies}
        self._allocated.clear()
        return sorted(unreadable)
