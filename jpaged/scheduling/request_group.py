"""One client's request: one prompt, one or several answers. Host side only: imports no JAX."""

from collections.abc import Sequence
from dataclasses import replace

from jpaged.outputs import CompletionOutput, FinishReason, RequestOutput, RequestTiming
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.group_policy import GroupPolicy
from jpaged.scheduling.request import Request


class RequestGroup:
    """requests: the answers, each with its own tokens and blocks; they share what is equal."""

    def __init__(
        self, request_id: str, prompt: str | None, params: SamplingParams, requests: list[Request]
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.num_answers = params.n
        self.requests = requests
        self.prompt_token_ids = tuple(requests[0].token_ids)
        for request in requests:
            request.siblings = requests

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
        """How the request ended as a whole: cut if one of its answers was; None before."""
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
        """One answer more, which begins as that of the request does so far."""
        child = request.fork(index=len(self.requests), seed=seed)
        self.requests.append(child)
        self.num_answers += 1
        return child

    def output(self) -> RequestOutput:
        """A snapshot that later steps do not change."""
        first = self.requests[0]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=self._completions(),
            finished=self.is_finished,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=(
                tuple(first.prompt_logprobs)
                if self.params.prompt_logprobs is not None and first.is_scored
                else None
            ),
            timing=self.timing,
        )

    def _completions(self) -> tuple[CompletionOutput, ...]:
        completions = [request.completion() for request in self.requests]
        if len(completions) > self.num_answers:
            if not self.is_finished:
                return ()  # which answers are the best is not known yet
            completions.sort(key=lambda each: -(each.cumulative_logprob or 0.0))
            best = completions[: self.num_answers]
            completions = [replace(each, index=index) for index, each in enumerate(best)]
        return tuple(completions)


def most_serious(reasons: Sequence[FinishReason | None]) -> FinishReason | None:
    """Return the reason that says most of a request some of whose sequences ended otherwise."""
    order = (None, FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)
    return next(reason for reason in order if reason in reasons)


def _earliest(times: Sequence[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)


def _latest(times: Sequence[float | None]) -> float | None:
    return None if None in times else max(time for time in times if time is not None)
