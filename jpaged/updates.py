"""What the engine hands over after a step: plain values that could cross a process border.

An update holds what is new since the update before, so that its cost does not depend on the length
of prompt and answer. Text is not the engine's: token ids become text where the updates are read.
"""

from dataclasses import dataclass

from jpaged.outputs import FinishReason, RequestTiming, TokenLogprobs


@dataclass(frozen=True)
class SequenceUpdate:
    """New tokens of one sequence.

    index: its place among the sequences of the request.
    logprobs: one entry a token if the request wants log-probabilities, else empty.
    finish_reason: STOP says that the last token is a stop token.
    stop_reason: that token, if it is one of the request's own `stop_token_ids`.
    """

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(frozen=True)
class Hypothesis:
    """A sequence that beam search has found, whole.

    score: what beam search ranks by; None when it ended before the first token.
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
    """What is new of one request.

    number: names the request within one engine.
    sequences: those with new tokens, or that are finished now. Of beam search, one: the tokens
        that all sequences which may win begin with.
    prompt_logprobs: all of them in one update, once they are all known; None before and after.
    hypotheses: the result of beam search, best first, when it has finished; empty otherwise.
    """

    number: int
    sequences: tuple[SequenceUpdate, ...]
    num_cached_tokens: int
    timing: RequestTiming
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    hypotheses: tuple[Hypothesis, ...] = ()
