"""Host memory for the blocks of preempted requests. Host side only: imports no JAX.

A preempted request is either computed again or moved to host memory and back (Kwon et al. 2023,
PagedAttention, section 4.5). Which one is cheaper depends on the machine and on the request, so
both are measured.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from jpaged.config import PreemptionMode
from jpaged.scheduling.prefill_clock import PrefillClock
from jpaged.scheduling.request import Request, SwappedBlocks


@dataclass(frozen=True)
class PreemptionCosts:
    """What bringing back a preempted request costs on this machine, as measured.

    swap_seconds: to copy one block out and in again. prefill_clock: knows what a token of a
    prompt takes.
    """

    swap_seconds: float
    prefill_clock: PrefillClock

    def prefer_swap(self, *, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving the blocks is cheaper than computing the tokens again."""
        prefill_seconds = self.prefill_clock.seconds_per_token
        if prefill_seconds is None:
            return False
        return num_blocks * self.swap_seconds < num_tokens * prefill_seconds


@dataclass(frozen=True)
class SwapOut:
    """swapped: where the runner keeps the content of `blocks`."""

    swapped: SwappedBlocks
    blocks: list[int]


@dataclass(frozen=True)
class SwapIn:
    """targets: blocks that get the content, in order; None for content that nobody needs."""

    swapped: SwappedBlocks
    targets: list[int | None]


class SwapSpace:
    """Counts the blocks in host memory and decides who goes there; the runner moves the data."""

    def __init__(self, num_blocks: int, *, mode: PreemptionMode, costs: PreemptionCosts) -> None:
        self.num_blocks = num_blocks
        self.num_used = 0
        self.num_requests = 0
        self.costs = costs
        self._mode = mode

    @classmethod
    def none(cls) -> Self:
        """All who are preempted are computed again."""
        costs = PreemptionCosts(swap_seconds=math.inf, prefill_clock=PrefillClock())
        return cls(0, mode="recompute", costs=costs)

    def takes(self, *, num_tokens: int, num_blocks: int) -> bool:
        """Whether requests with so many computed tokens, in so many blocks, are to be moved here.

        Without room they are computed again.
        """
        if self._mode == "recompute" or self.num_used + num_blocks > self.num_blocks:
            return False
        return self._mode == "swap" or self.costs.prefer_swap(
            num_tokens=num_tokens, num_blocks=num_blocks
        )

    def put(self, tables: dict[Request, list[int]]) -> SwapOut:
        """Take in requests with the blocks that hold their tokens; a shared one is moved once."""
        blocks = list(dict.fromkeys(block for table in tables.values() for block in table))
        index = {block: position for position, block in enumerate(blocks)}
        swapped = SwappedBlocks(
            num_blocks=len(blocks),
            tables={
                request: [index[block] for block in table] for request, table in tables.items()
            },
        )
        for request in tables:
            request.swapped = swapped
        self.num_used += len(blocks)
        self.num_requests += len(tables)
        return SwapOut(swapped, blocks)

    def drop(self, request: Request) -> None:
        """The request is back, or gone: the last one of those that left together frees the room."""
        swapped = request.swapped
        if swapped is not None:
            request.swapped = None
            self.num_requests -= 1
            del swapped.tables[request]
            if not swapped.tables:
                self.num_used -= swapped.num_blocks

    def check_integrity(self, waiting: Iterable[Request]) -> None:
        """Raise if the counts are not those of the waiting requests."""
        waiting = list(waiting)
        num_requests = sum(each.swapped is not None for each in waiting)
        assert num_requests == self.num_requests, f"{num_requests=} {self.num_requests=}"
        held = {id(each.swapped): each.swapped for each in waiting if each.swapped is not None}
        total = sum(swapped.num_blocks for swapped in held.values())
        assert total == self.num_used <= self.num_blocks, f"{total=} {self.num_used=}"
