"""What the scheduler tells the runner to compute. Host side only: imports no JAX."""

from dataclasses import dataclass, field

from jpaged.scheduling.request import Request
from jpaged.scheduling.swap import SwapIn, SwapOut


@dataclass(frozen=True)
class ScheduledRequest:
    """Tokens [start, start + num_tokens) of a request are computed in the step.

    is_sampled: the step reaches the request's last token and samples the next one.
    scored: positions of prompt tokens whose log-probabilities are read from this step's logits.
    forks: siblings that share all blocks of the request from this step on, and get a first token
        of their own from the same logits.
    """

    request: Request
    start: int
    num_tokens: int
    is_sampled: bool
    scored: range = range(0)
    forks: list[Request] = field(default_factory=list)

    @property
    def sampled(self) -> list[Request]:
        """Requests that get a token from the logits of this row's last token."""
        return [self.request, *self.forks] if self.is_sampled else []


@dataclass
class ScheduledBatch:
    """What one step computes.

    swap_outs, swap_ins: blocks to move to host memory, and back; never both. They come first.
    copies: blocks to copy (from, to) before anything is computed, all at the same time.
    num_outputs: tokens whose logits are used.
    num_hidden_tokens: tokens that need not be computed as they were in the prefix cache, but that
        nobody outside may know of; see `BlockTables.num_reported`.
    finished: requests that scheduling itself has ended, since the pool cannot hold more of them.
    """

    decodes: list[ScheduledRequest] = field(default_factory=list)
    prefills: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    swap_outs: list[SwapOut] = field(default_factory=list)
    swap_ins: list[SwapIn] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    num_outputs: int = 0
    num_hidden_tokens: int = 0

    def add_decode(self, row: ScheduledRequest) -> None:
        self.decodes.append(row)
        self._count(row)

    def add_prefill(self, row: ScheduledRequest) -> None:
        self.prefills.append(row)
        self._count(row)

    def add_fork(self, row: ScheduledRequest, sibling: Request) -> None:
        row.forks.append(sibling)
        self.num_outputs += 1

    def drop_rows(self, request: Request) -> None:
        """Compute nothing of the request after all."""
        self.decodes = [row for row in self.decodes if row.request is not request]
        self.prefills = [row for row in self.prefills if row.request is not request]
        self.num_tokens = self.num_outputs = 0
        for row in self.rows:
            self._count(row)

    def _count(self, row: ScheduledRequest) -> None:
        self.num_tokens += row.num_tokens
        self.num_outputs += len(row.sampled) + len(row.scored)

    @property
    def rows(self) -> list[ScheduledRequest]:
        """Decodes first: the order of the rows on the device."""
        return self.decodes + self.prefills

    @property
    def scored_rows(self) -> list[ScheduledRequest]:
        return [row for row in self.rows if row.scored]

    @property
    def sampled(self) -> list[Request]:
        """Requests that get a token, in the order of the rows."""
        requests = []
        for row in self.rows:  # by far most of them are decodes, without forks
            if row.is_sampled:
                requests.append(row.request)
                requests += row.forks
        return requests
