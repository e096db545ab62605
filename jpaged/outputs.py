"""What callers get back: immutable snapshots of a request's progress."""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context limit, or a pool that cannot hold more
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the engine failed


@dataclass(frozen=True, kw_only=True)
class RequestTiming:
    """Seconds on the clock of `time.monotonic()`; None until it has happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token, in the model's own distribution.

    logprob: of the token itself. top: (token id, log-probability) of the most likely tokens,
    best first; as many as were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer.

    text: the answer so far; text that may still turn into a stop string is held back.
    token_ids: all tokens generated, the stop token included.
    stop_reason: the stop string or stop token id that ended the answer; None for
        end-of-sequence tokens of the model and for other finish reasons.
    logprobs: one entry a token; None when none were asked for.
    cumulative_logprob: their sum.
    score: what beam search ranks by; None without it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request's prompt and its answers so far.

    prompt: None when the prompt came as token ids.
    num_cached_tokens: prompt tokens that were not computed but found in the prefix cache, in
        whole blocks: a multiple of the block size.
    prompt_logprobs: an entry a prompt token once all are there, that of the first token being
        None; None when none were asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    timing: RequestTiming
