"""One client's request: one prompt, one or several sequences. Host side only: imports no JAX."""

from collections.abc import Sequence

from jpaged.outputs import FinishReason, RequestTiming
from jpaged.scheduling.group_policy import GroupPolicy
from jpaged.scheduling.request import Request
from jpaged.updates import RequestUpdate, SequenceUpdate


class RequestGroup:
    """The sequences of one request, each with its own tokens and blocks; they share what is equal.

    number: names the request within one engine; `request_id`, which the client may choose, does
        not.
    """

    def __init__(self, number: int, requests: list[Request]) -> None:
        self.number = number
        self.requests = requests
        self._has_reported_prompt = requests[0].num_prompt_logprobs is None
        for request in requests:
            request.group = self

    @property
    def request_id(self) -> str:
        return self.requests[0].request_id

    @property
    def policy(self) -> GroupPolicy:
        return self.requests[0].policy

    @property
    def num_prompt_tokens(self) -> int:
        return self.requests[0].num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return all(request.is_finished for request in self.requests)

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the request ended as a whole: cut if one of its sequences was; None before."""
        return most_serious([request.finish_reason for request in self.requests])

    @property
    def timing(self) -> RequestTiming:
        return RequestTiming(
            arrival=self.requests[0].arrival_time,
            first_scheduled=_earliest([each.first_scheduled_time for each in self.requests]),
            first_token=_earliest([each.first_token_time for each in self.requests]),
            finished=_latest([each.finished_time for each in self.requests]),
        )

    def fork(self, request: Request, seed: int) -> Request:
        """One sequence more, which begins as the request's does so far."""
        child = request.fork(index=len(self.requests), seed=seed)
        self.requests.append(child)
        return child

    def take_update(self) -> RequestUpdate:
        """What is new since the last call."""
        first = self.requests[0]
        prompt_logprobs = None
        if not self._has_reported_prompt and first.is_scored:
            self._has_reported_prompt = True
            prompt_logprobs = tuple(first.prompt_logprobs)
        return RequestUpdate(
            number=self.number,
            sequences=self._take_sequences(),
            num_cached_tokens=first.num_cached_tokens,
            timing=self.timing,
            prompt_logprobs=prompt_logprobs,
        )

    def _take_sequences(self) -> tuple[SequenceUpdate, ...]:
        updates = (request.take_update() for request in self.requests)
        return tuple(update for update in updates if update is not None)


def most_serious(reasons: Sequence[FinishReason | None]) -> FinishReason | None:
    """Return the reason that says most of a request some of whose sequences ended otherwise."""
    order = (None, FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)
    return next(reason for reason in order if reason in reasons)


def _earliest(times: Sequence[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _latest(times: Sequence[float | None]) -> float | None:
    return None if None in times else max(time for time in times if time is not None)
