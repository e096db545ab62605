"""Text of single tokens, and where in the text of an answer each of them begins."""

from collections.abc import Sequence
from functools import lru_cache

from jpaged.detokenizer import REPLACEMENT
from jpaged.tokenizer import Tokenizer

MAX_CHARACTER_BYTES = 4
CACHED_TEXTS = 2**16


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token as it reads in the middle of a text; U+FFFD for a part of a character."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    return _inner_text(tokenizer, (token_id,))


class TextOffsets:
    """Goes along the tokens of an answer and tells where in its text each begins.

    Counted as if no stop string cut the text. Tokens that make one character together begin
    where it does.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._length = 0  # of the text before the open tokens
        self._open: tuple[int, ...] = ()  # tokens up to now that end within a character
        self._open_text = ""

    def next(self, token_id: int) -> int:
        offset = self._length + len(self._open_text.rstrip(REPLACEMENT))
        if self._tokenizer is None or self._is_skipped(self._tokenizer, token_id):
            return offset
        self._open += (token_id,)
        self._open_text = _inner_text(self._tokenizer, self._open)
        is_open = self._open_text.endswith(REPLACEMENT) and len(self._open) < MAX_CHARACTER_BYTES
        if not is_open:
            self._length += len(self._open_text)
            self._open, self._open_text = (), ""
        return offset

    def _is_skipped(self, tokenizer: Tokenizer, token_id: int) -> bool:
        return self._skip_special_tokens and token_id in tokenizer.special_token_ids


# A token is asked for once a place among the most likely ones: the same few thousand all the time.
@lru_cache(maxsize=CACHED_TEXTS)
def _inner_text(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> str:
    """Decoders may drop a space in front of the first word, so a letter is put before it."""
    letter, letter_text = _letter(tokenizer)
    text = _decode(tokenizer, (*letter, *token_ids))
    if text.startswith(letter_text):
        return text[len(letter_text) :]
    return _decode(tokenizer, token_ids)


@lru_cache(maxsize=16)
def _letter(tokenizer: Tokenizer) -> tuple[tuple[int, ...], str]:
    token_ids = tuple(tokenizer.encode("a", add_special_tokens=False)[-1:])
    return token_ids, _decode(tokenizer, token_ids)


def _decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=False)
