"""Log-probabilities in the two forms of OpenAI's API.

Values are those of the model's own distribution, before temperature and filters.
"""

from jpaged.outputs import TokenLogprobs
from jpaged.server.deltas import Delta
from jpaged.server.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TokenLogprob,
)
from jpaged.server.token_text import TextOffsets, token_text
from jpaged.tokenizer import Tokenizer

# JSON cannot hold minus infinity; OpenAI's number for "very unlikely".
LEAST_LOGPROB = -9999.0


def completion_logprobs(
    delta: Delta, tokenizer: Tokenizer | None, offsets: TextOffsets
) -> CompletionLogprobs | None:
    """offsets: of the answer; goes along the tokens of the delta."""
    if delta.logprobs is None:
        return None
    entries = list(zip(delta.token_ids, delta.logprobs, strict=True))
    return {
        "tokens": [token_text(tokenizer, token_id) for token_id in delta.token_ids],
        "token_logprobs": [_finite(entry.logprob) for entry in delta.logprobs],
        "top_logprobs": [_by_text(tokenizer, token_id, entry) for token_id, entry in entries],
        "text_offset": [offsets.next(token_id) for token_id in delta.token_ids],
    }


def chat_logprobs(delta: Delta, tokenizer: Tokenizer | None) -> ChatLogprobs | None:
    if delta.logprobs is None:
        return None
    entries = zip(delta.token_ids, delta.logprobs, strict=True)
    return {
        "content": [_chat_entry(tokenizer, token_id, entry) for token_id, entry in entries],
        "refusal": None,
    }


def _by_text(tokenizer: Tokenizer | None, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
    """The most likely tokens and the generated one, best first.

    Of tokens with the same text, the generated one stands for all, or else the most likely.
    """
    found: dict[str, float] = {}
    for each_id, logprob in ((token_id, entry.logprob), *entry.top):
        found.setdefault(token_text(tokenizer, each_id), _finite(logprob))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _chat_entry(
    tokenizer: Tokenizer | None, token_id: int, entry: TokenLogprobs
) -> ChatTokenLogprob:
    own = _token(tokenizer, token_id, entry.logprob)
    return {**own, "top_logprobs": [_token(tokenizer, *top) for top in entry.top]}


def _token(tokenizer: Tokenizer | None, token_id: int, logprob: float) -> TokenLogprob:
    text = token_text(tokenizer, token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
