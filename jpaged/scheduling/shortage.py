"""Remembers why the first in the queue cannot start. Host side only: imports no JAX."""

from collections.abc import Hashable
from dataclasses import dataclass

from jpaged.scheduling.block_pool import BlockPool


@dataclass(frozen=True)
class _Shortage:
    """What was found when the pool lacked blocks. num_freed: `BlockPool.num_freed` at that time."""

    key: Hashable
    num_missing: int
    num_freed: int
    headroom: int


class ShortageMemo:
    """Saves looking again at what waits for blocks while nothing has changed.

    Finding out what a request needs takes time in proportion to its context, and it may wait for
    many steps. Until as many blocks were freed as it lacked, the result cannot be another one.
    """

    def __init__(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool
        self._latest: _Shortage | None = None

    def note(self, key: Hashable, *, num_missing: int, headroom: int) -> None:
        """Remember that blocks are missing.

        key: what was tried, with all that its need depends on besides the pool. num_missing:
        blocks that it lacked. headroom: free blocks that others need, which are counted in.
        """
        num_freed = self._block_pool.num_freed
        self._latest = _Shortage(key, num_missing, num_freed, headroom)

    def persists(self, key: Hashable, *, headroom: int) -> bool:
        """Tell whether blocks are certainly still missing, apart from new ones to share."""
        latest = self._latest
        if latest is None or latest.key != key:
            return False
        num_freed = self._block_pool.num_freed - latest.num_freed
        return num_freed + latest.headroom - headroom < latest.num_missing
