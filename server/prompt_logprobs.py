"""Formats log-probabilities of prompts as vLLM does."""

from jpaged.errors import RequestError
from jpaged.outputs import TokenLogprobs
from jpaged.server.deltas import GivenPrompt
from jpaged.server.logprobs import finite
from jpaged.server.protocol import PromptLogprobs, PromptTokenLogprob, SamplingRequest
from jpaged.text.token_text import token_text
from jpaged.text.tokenizer import Tokenizer


def refuse_prompt_logprobs_in_streams(request: SamplingRequest) -> None:
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError(
            f"prompt_logprobs ({request.prompt_logprobs}) is not available in streams: leave it "
            "out, or set stream to false",
            param="prompt_logprobs",
        )


def prompt_logprobs(
    prompt: GivenPrompt, tokenizer: Tokenizer | None, num_top: int
) -> PromptLogprobs:
    """Return an entry for each prompt token. num_top: number of likeliest tokens to show."""
    assert prompt.logprobs is not None
    return [
        None if entry is None else _by_id(tokenizer, token_id, entry, num_top)
        for token_id, entry in zip(prompt.token_ids, prompt.logprobs, strict=True)
    ]


def _by_id(
    tokenizer: Tokenizer | None, own_id: int, entry: TokenLogprobs, num_top: int
) -> dict[str, PromptTokenLogprob]:
    # The engine may have been asked for more, for an echo.
    ranked = {token_id: rank for rank, (token_id, _) in enumerate(entry.top[:num_top], start=1)}
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": ranked.get(token_id),
            "decoded_token": token_text(tokenizer, token_id),
        }
        for token_id, logprob in {own_id: entry.logprob, **dict(entry.top[:num_top])}.items()
    }
