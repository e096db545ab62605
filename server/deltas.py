"""Differences between snapshots of a request's answers, which are what streams send."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jpaged.outputs import CompletionOutput, FinishReason, RequestOutput, TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class GivenPrompt:
    """A prompt, as it stands in an answer.

    text: None if the client sent token ids.
    logprobs: one entry a token, None for the first. Equal prompts have equal log-probabilities.
    """

    text: str | None
    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs | None] | None = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What a snapshot of an answer has that the one before it had not.

    logprobs: one entry a token; None if the request asks for none.
    prompt: set in the first delta of an answer only.
    """

    text: str
    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt: GivenPrompt | None


def deltas(before: RequestOutput | None, now: RequestOutput) -> list[tuple[int, Delta]]:
    """Return index and delta of each answer that has changed.

    Answers take turns, start late and end early, and a slow reader skips snapshots: so an answer
    may have nothing new, or several tokens at once.
    """
    found = []
    for answer in now.outputs:
        seen = _NOTHING if before is None else before.outputs[answer.index]
        has_new_tokens = len(answer.token_ids) > len(seen.token_ids)
        # Beams may share a part of the text of tokens that they do not share.
        has_new_text = len(answer.text) > len(seen.text)
        if has_new_tokens or has_new_text or answer.finish_reason != seen.finish_reason:
            prompt = None if _is_begun(seen) else given_prompt(now)
            found.append((answer.index, _delta(seen, answer, prompt)))
    return found


def given_prompt(output: RequestOutput) -> GivenPrompt:
    return GivenPrompt(
        text=output.prompt, token_ids=output.prompt_token_ids, logprobs=output.prompt_logprobs
    )


_NOTHING = CompletionOutput(index=0, text="", token_ids=())


def _is_begun(answer: CompletionOutput) -> bool:
    return bool(answer.token_ids or answer.text) or answer.finish_reason is not None


def _delta(seen: CompletionOutput, now: CompletionOutput, prompt: GivenPrompt | None) -> Delta:
    first_new = len(seen.token_ids)
    return Delta(
        text=now.text[len(seen.text) :],
        token_ids=list(now.token_ids[first_new:]),
        logprobs=None if now.logprobs is None else now.logprobs[first_new:],
        finish_reason=now.finish_reason,
        stop_reason=now.stop_reason,
        prompt=prompt,
    )
