"""Which KV blocks are free and who holds the others. Host side only: imports no JAX."""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

SINK_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks, each free or held; block 0 is the sink of padding and never given out.

    A block is free exactly when its reference count is 0. Freed blocks are handed out again in
    the order in which they were freed.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"{num_blocks=}"
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._reference_counts = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return self.num_used / self.num_blocks

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder. The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count=} blocks wanted, {len(self._free)} free"
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._reference_counts[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            assert self._reference_counts[block] > 0, f"block {block} is free"
            self._reference_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take a holder from each block; without any, it is free. Releasing a free block raises."""
        for block in blocks:
            if self._reference_counts[block] <= 0:
                raise AssertionError(f"block {block} is released but nobody holds it")
            self._reference_counts[block] -= 1
            if self._reference_counts[block] == 0:
                self._free.append(block)

    def reference_count(self, block: int) -> int:
        return self._reference_counts[block]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Recompute every total from the holders' block tables; raise with the numbers."""
        held = Counter(block for table in tables for block in table)
        free = Counter(self._free)
        assert SINK_BLOCK not in held, "the sink block is in a block table"
        for block in range(1, self.num_blocks + 1):
            count = self._reference_counts[block]
            assert count == held[block], f"block {block}: {count=}, but {held[block]} holders"
            expected_free = 1 if count == 0 else 0
            assert free[block] == expected_free, f"block {block}: {count=}, {free[block]=}"
        assert self.num_free + len(held) == self.num_blocks, (
            f"{self.num_free} free + {len(held)} held != {self.num_blocks}"
        )
