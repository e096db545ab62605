"""Updates of requests, which the engine returns after each step.

They are plain values, so that they could be sent to another process. An update has only what is
new since the one before: its cost does not depend on the length of prompt and answer. It has token
ids and no text, which is made where updates are read.
"""

from dataclasses import dataclass

from jpaged.outputs import FinishReason, RequestTiming, TokenLogprobs


@dataclass(frozen=True)
class SequenceUpdate:
    """New tokens of one sequence.

    index: its place among the sequences of the request.
    logprobs: one entry a token if the request wants log-probabilities, else empty.
    finish_reason: None while the sequence goes on. With STOP, its last token is a stop token.
    stop_reason: that token, if it is one of the request's own `stop_token_ids`.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(frozen=True)
class Hypothesis:
    """A complete sequence that beam search has found.

    score: rank value of the search; None if it ended before the first token.
    stop_reason: the stop string or the listed stop token that ended it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    cumulative_logprob: float
    score: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestUpdate:
    """News of one request since its update before.

    number: identifies the request within one engine.
    sequences: those with new tokens or a new finish reason. Beam search reports one sequence: the
        common beginning of all that may still win.
    prompt_logprobs: all of them, in the first update after they are known; None in all others.
    hypotheses: the result of beam search, best first, when it has finished; empty otherwise.
    """

    number: int
    sequences: tuple[SequenceUpdate, ...]
    num_cached_tokens: int
    timing: RequestTiming
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    hypotheses: tuple[Hypothesis, ...] = ()
