"""Log-probabilities in the two forms of OpenAI's API.

Values are those of the model's own distribution, before temperature and filters.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jpaged.outputs import TokenLogprobs
from jpaged.server.deltas import Delta
from jpaged.server.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TokenLogprob,
)
from jpaged.text.token_text import TextOffsets, token_text
from jpaged.text.tokenizer import Tokenizer

# JSON cannot hold minus infinity; OpenAI's number for "very unlikely".
LEAST_LOGPROB = -9999.0


class TextToken(NamedTuple):
    """A token of a text. begins_text: it reads as it does where nothing is before it."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int
    begins_text: bool = False


def text_tokens(delta: Delta, offsets: TextOffsets) -> list[TextToken]:
    """offsets: of the answer; goes along the tokens of the delta."""
    entries = zip(delta.token_ids, delta.logprobs or (), strict=True)
    return [TextToken(token_id, entry, offsets.next(token_id)) for token_id, entry in entries]


def completion_logprobs(
    tokens: Sequence[TextToken], tokenizer: Tokenizer | None
) -> CompletionLogprobs:
    return {
        "tokens": [
            token_text(tokenizer, token.token_id, begins_text=token.begins_text) for token in tokens
        ],
        "token_logprobs": [
            None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens
        ],
        "top_logprobs": [_by_text(tokenizer, token) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def joined(first: CompletionLogprobs | None, then: CompletionLogprobs) -> CompletionLogprobs:
    """The entries of a prompt and those of an answer to it, which many answers may share."""
    if first is None:
        return then
    return {
        "tokens": first["tokens"] + then["tokens"],
        "token_logprobs": first["token_logprobs"] + then["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + then["top_logprobs"],
        "text_offset": first["text_offset"] + then["text_offset"],
    }


def chat_logprobs(delta: Delta, tokenizer: Tokenizer | None) -> ChatLogprobs | None:
    if delta.logprobs is None:
        return None
    entries = zip(delta.token_ids, delta.logprobs, strict=True)
    return {
        "content": [_chat_entry(tokenizer, token_id, entry) for token_id, entry in entries],
        "refusal": None,
    }


def _by_text(tokenizer: Tokenizer | None, token: TextToken) -> dict[str, float] | None:
    """The most likely tokens and the one that is there, best first.

    Of tokens with the same text, the one that is there stands for all, or else the most likely.
    """
    if token.logprobs is None:
        return None
    found: dict[str, float] = {}
    for token_id, logprob in ((token.token_id, token.logprobs.logprob), *token.logprobs.top):
        text = token_text(tokenizer, token_id, begins_text=token.begins_text)
        found.setdefault(text, finite(logprob))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _chat_entry(
    tokenizer: Tokenizer | None, token_id: int, entry: TokenLogprobs
) -> ChatTokenLogprob:
    own = _token(tokenizer, token_id, entry.logprob)
    return {**own, "top_logprobs": [_token(tokenizer, *top) for top in entry.top]}


def _token(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> TokenLogprob:
    text = token_text(tokenizer, token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
