"""Formats log-probabilities as OpenAI's API has them, of completions and of chats.

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
from jpaged.text.token_bytes import token_bytes
from jpaged.text.token_text import TextOffsets, token_text
from jpaged.text.tokenizer import Tokenizer

# JSON cannot hold minus infinity; OpenAI's number for "very unlikely".
LEAST_LOGPROB = -9999.0


class TextToken(NamedTuple):
    """A token of a text.

    offset: where in the text it begins.
    begins_text: its text is the one that it has at the beginning of a text.
    is_shown: it is part of the text; False for special tokens that are skipped.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int
    begins_text: bool = False
    is_shown: bool = True


def text_tokens(delta: Delta, offsets: TextOffsets) -> list[TextToken]:
    """Return the tokens of a delta. offsets: of the choice's text; advanced by each delta."""
    entries = zip(delta.token_ids, delta.logprobs or (), strict=True)
    return [
        TextToken(token_id, entry, is_shown=offsets.shows(token_id), offset=offsets.next(token_id))
        for token_id, entry in entries
    ]


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
        "bytes": [_text_bytes(tokenizer, token) for token in tokens],
    }


def joined(first: CompletionLogprobs | None, then: CompletionLogprobs) -> CompletionLogprobs:
    """Return the entries of a prompt followed by those of an answer. Changes neither."""
    if first is None:
        return then
    return {
        "tokens": first["tokens"] + then["tokens"],
        "token_logprobs": first["token_logprobs"] + then["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + then["top_logprobs"],
        "text_offset": first["text_offset"] + then["text_offset"],
        "bytes": first["bytes"] + then["bytes"],
    }


def chat_logprobs(
    delta: Delta, tokenizer: Tokenizer | None, *, skip_special_tokens: bool
) -> ChatLogprobs | None:
    if delta.logprobs is None:
        return None

    def shown(token_id: int, logprob: float) -> TokenLogprob:
        text = token_text(tokenizer, token_id)
        own_bytes = _bytes(tokenizer, token_id, skip_special_tokens=skip_special_tokens)
        return {"token": text, "logprob": finite(logprob), "bytes": own_bytes}

    content: list[ChatTokenLogprob] = [
        {**shown(token_id, entry.logprob), "top_logprobs": [shown(*top) for top in entry.top]}
        for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _by_text(tokenizer: Tokenizer | None, token: TextToken) -> dict[str, float] | None:
    """Return log-probabilities by text: of the token itself and the likeliest ones, best first.

    Several tokens may have the same text. The token itself then stands for all of them, or else
    the most likely one does.
    """
    if token.logprobs is None:
        return None
    found: dict[str, float] = {}
    for token_id, logprob in ((token.token_id, token.logprobs.logprob), *token.logprobs.top):
        text = token_text(tokenizer, token_id, begins_text=token.begins_text)
        found.setdefault(text, finite(logprob))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _bytes(
    tokenizer: Tokenizer | None, token_id: int, *, skip_special_tokens: bool
) -> list[int] | None:
    """Return the bytes that the token adds to a text in UTF-8; None without a tokenizer."""
    if tokenizer is None:
        return None
    if skip_special_tokens and token_id in tokenizer.special_token_ids:
        return []
    return list(token_bytes(tokenizer, token_id))


def _text_bytes(tokenizer: Tokenizer | None, token: TextToken) -> list[int] | None:
    if tokenizer is not None and not token.is_shown:
        return []
    if tokenizer is not None and token.begins_text:
        return list(token_text(tokenizer, token.token_id, begins_text=True).encode())
    return _bytes(tokenizer, token.token_id, skip_special_tokens=False)


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
