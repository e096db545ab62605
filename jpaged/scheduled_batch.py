"""What the scheduler tells the runner to compute. Host side only: imports no JAX."""

from dataclasses import dataclass, field

from jpaged.request import Request


@dataclass(frozen=True)
class ScheduledRequest:
    """Tokens [start, start + num_tokens) of a request are computed in the step.

    is_sampled: the step reaches the request's last token and samples the next one.
    """

    request: Request
    start: int
    num_tokens: int
    is_sampled: bool


@dataclass
class ScheduledBatch:
    """What one step computes.

    finished: requests that scheduling itself has ended, since the pool cannot hold more of them.
    """

    decodes: list[ScheduledRequest] = field(default_factory=list)
    prefills: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def rows(self) -> list[ScheduledRequest]:
        """Decodes first: the order of the rows on the device."""
        return self.decodes + self.prefills
