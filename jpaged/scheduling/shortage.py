"""Remembers why a request cannot start, to save looking again. Host side only: imports no JAX."""

from dataclasses import dataclass

from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.request import Request


@dataclass(frozen=True)
class Shortage:
    """The first waiting request lacked blocks when it was last tried.

    Finding out what it needs takes time in proportion to its context, and it may wait for many
    steps. Until as many blocks were freed as it lacked, the result cannot be another one.

    num_tokens: of the request at that time. num_missing: blocks that it lacked.
    num_freed: `BlockPool.num_freed` at that time. headroom: blocks that were to stay free.
    """

    request: Request
    num_tokens: int
    num_missing: int
    num_freed: int
    headroom: int

    def persists(self, request: Request, pool: BlockPool, *, headroom: int) -> bool:
        """Whether the request certainly still lacks blocks, apart from new ones to share."""
        if request is not self.request or request.num_tokens != self.num_tokens:
            return False
        num_gained = pool.num_freed - self.num_freed + self.headroom - headroom
        return num_gained < self.num_missing
