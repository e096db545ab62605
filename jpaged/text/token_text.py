"""Text of single tokens, and where in a text each of them begins."""

from collections.abc import Sequence
from functools import lru_cache

from jpaged.text.detokenizer import REPLACEMENT
from jpaged.text.tokenizer import Tokenizer

MAX_CHARACTER_BYTES = 4
# Characters of a prompt that one token may have lost, so that those after it are found again.
MAX_LOST_CHARACTERS = 8
CACHED_TEXTS = 2**16


def token_text(tokenizer: Tokenizer | None, token_id: int, *, begins_text: bool = False) -> str:
    """A token as it reads in the middle of a text; U+FFFD for a part of a character.

    begins_text: as it reads where nothing is before it, where decoders may drop a space.
    """
    if tokenizer is None:
        return f"token_id:{token_id}"
    return _decode(tokenizer, (token_id,)) if begins_text else _inner_text(tokenizer, (token_id,))


class TextOffsets:
    """Tells where in the text of an answer each of its tokens begins, token by token.

    Counted as if no stop string cut the text. Tokens that make one character together begin
    where it does. start: where the answer begins.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool, start: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._length = start  # of the text before the open tokens
        self._open: tuple[int, ...] = ()  # tokens up to now that end within a character
        self._open_text = ""

    def shows(self, token_id: int) -> bool:
        """Whether the next token, if it is this one, is a part of the text."""
        return self._tokenizer is None or not self._is_skipped(self._tokenizer, token_id)

    def next(self, token_id: int) -> int:
        """Take the next token; return where it begins."""
        offset = self._length + len(self._open_text.rstrip(REPLACEMENT))
        if self._tokenizer is None or self._is_skipped(self._tokenizer, token_id):
            return offset
        self._open += (token_id,)
        self._open_text = _inner_text(self._tokenizer, self._open)
        is_open = self._open_text.endswith(REPLACEMENT) and len(self._open) < MAX_CHARACTER_BYTES
        if not is_open:
            self._length = self._end(self._open, self._open_text)
            self._open, self._open_text = (), ""
        return offset

    def _end(self, token_ids: tuple[int, ...], text: str) -> int:
        """End of the tokens that begin at `_length` and read `text` in the middle of a text."""
        return self._length + len(text)

    def _is_skipped(self, tokenizer: Tokenizer, token_id: int) -> bool:
        return self._skip_special_tokens and token_id in tokenizer.special_token_ids


class PromptOffsets(TextOffsets):
    """Tells where in the known text of a prompt each of its tokens begins.

    Tokenizers add what the text does not have, such as a token at the beginning or a space in
    front of the first word. Some also write characters in another way.
    """

    def __init__(self, tokenizer: Tokenizer | None, text: str) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._text = text

    def reads_as_first(self, token_id: int, offset: int) -> bool:
        """Whether the token is in the text as it reads with nothing before it, and only so."""
        if self._is_at(token_text(self._tokenizer, token_id), offset):
            return False
        return self._is_at(token_text(self._tokenizer, token_id, begins_text=True), offset)

    def _end(self, token_ids: tuple[int, ...], text: str) -> int:
        assert self._tokenizer is not None
        start = self._length
        if self._is_at(text, start):
            return start + len(text)
        first_text = _decode(self._tokenizer, token_ids)
        if self._is_at(first_text, start):
            return start + len(first_text)
        found = self._text.find(text, start, start + MAX_LOST_CHARACTERS + len(text))
        return min(max(found, start) + len(text), len(self._text))

    def _is_skipped(self, tokenizer: Tokenizer, token_id: int) -> bool:
        """A special token may have been written in the prompt, and is shown then."""
        if not super()._is_skipped(tokenizer, token_id):
            return False
        return not self._is_at(token_text(tokenizer, token_id), self._length)

    def _is_at(self, text: str, offset: int) -> bool:
        return self._text.startswith(text, offset)


# A token is asked for once a place among the most likely ones: the same few thousand all the time.
@lru_cache(maxsize=CACHED_TEXTS)
def _inner_text(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> str:
    """Text of the tokens in the middle of a text: decoders may drop the space in front of a first
    word, so a letter is decoded before them."""
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
