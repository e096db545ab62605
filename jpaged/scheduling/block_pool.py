"""Which KV blocks are free, who holds the others, and what is in them. Imports no JAX."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

SINK_BLOCK = 0


class BlockPool:
    """Blocks 1..num_blocks, each free or held; block 0 is the sink of padding and never given out.

    A block is free exactly when its reference count is 0. A block may carry a digest of what is
    in it: then it can be found and held again, until it is handed out as a new block. Free
    blocks without a digest are handed out first, then the others in the order in which they were
    freed (least recently used first). Every operation takes constant time a block.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, f"{num_blocks=}"
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._reference_counts = [0] * (num_blocks + 1)
        self._digests: list[bytes | None] = [None] * (num_blocks + 1)
        self._blocks: dict[bytes, int] = {}
        # How often a block has become free: what waits for room need not look before it grows.
        self.num_freed = 0

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
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._reference_counts[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block, which is held already or found by its digest."""
        for block in blocks:
            if self._reference_counts[block] == 0:
                del self._free[block]
            self._reference_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take a holder from each block; without any, it is free. Releasing a free block raises."""
        for block in blocks:
            if self._reference_counts[block] <= 0:
                raise AssertionError(f"block {block} is released but nobody holds it")
            self._reference_counts[block] -= 1
            if self._reference_counts[block] == 0:
                self.num_freed += 1
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, digest: bytes) -> bool:
        """Note what is in a held block. False if another block has the same already."""
        assert self._reference_counts[block] > 0, f"block {block} is free"
        if digest in self._blocks:
            return self._blocks[digest] == block
        assert self._digests[block] is None, f"block {block} has a digest already"
        self._digests[block] = digest
        self._blocks[digest] = block
        return True

    def find(self, digest: bytes) -> int | None:
        """The block, held or free, that has this in it."""
        return self._blocks.get(digest)

    def digest(self, block: int) -> bytes | None:
        """What is in the block, if that is known."""
        return self._digests[block]

    def registered_blocks(self) -> Iterable[int]:
        return self._blocks.values()

    def touch(self, block: int) -> None:
        """Count a free block of known content as used just now: it is handed out last."""
        if block in self._free and self._digests[block] is not None:
            self._free.move_to_end(block)

    def is_free(self, block: int) -> bool:
        return self._reference_counts[block] == 0

    def reference_count(self, block: int) -> int:
        return self._reference_counts[block]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Recompute every total from the holders' block tables; raise with the numbers."""
        held = Counter(block for table in tables for block in table)
        assert SINK_BLOCK not in held, "the sink block is in a block table"
        for block in range(1, self.num_blocks + 1):
            count = self._reference_counts[block]
            assert count == held[block], f"block {block}: {count=}, but {held[block]} holders"
            assert (block in self._free) == (count == 0), f"block {block}: {count=} and free"
        assert self.num_free + len(held) == self.num_blocks, (
            f"{self.num_free} free + {len(held)} held != {self.num_blocks}"
        )
        for digest, block in self._blocks.items():
            assert self._digests[block] == digest, f"block {block} is found under an old digest"
        num_digests = sum(digest is not None for digest in self._digests)
        assert num_digests == len(self._blocks), f"{num_digests=} {len(self._blocks)=}"

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            self._digests[block] = None
            del self._blocks[digest]
