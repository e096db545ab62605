"""How fast prompts are computed, as seen from the host. Imports no JAX."""

from dataclasses import dataclass, field

# Weight of the newest measurement in the moving average.
NEWEST_WEIGHT = 0.2


@dataclass(frozen=True)
class StepTrace:
    """num_tokens: computed in the step. launched_at: seconds on `time.perf_counter()`."""

    num_tokens: int
    has_prefill: bool
    launched_at: float


@dataclass
class PrefillClock:
    """Steps run one after the other, so the time from one result to the next is that of the steps
    between them. Chunks in the middle of prompts have no results: they count with the next one.

    seconds_per_token: moving average over steps with prompts; None before the first.
    """

    seconds_per_token: float | None = None
    _unread: list[StepTrace] = field(default_factory=list)
    _last_result_at: float = 0.0

    def record(self, step: StepTrace, *, has_result: bool, now: float) -> None:
        """The step was processed `now`; only with a result it is known to be done."""
        self._unread.append(step)
        if not has_result:
            return
        started = max(self._last_result_at, self._unread[0].launched_at)
        if any(each.has_prefill for each in self._unread):
            self._average((now - started) / sum(each.num_tokens for each in self._unread))
        self._unread.clear()
        self._last_result_at = now

    def _average(self, newest: float) -> None:
        known = newest if self.seconds_per_token is None else self.seconds_per_token
        self.seconds_per_token = known + NEWEST_WEIGHT * (newest - known)
