"""Token ids in, text out: as early as it is certain, and cut at stop strings. Imports no JAX.

Decoding token by token is wrong: a character can span tokens, and decoders look at neighbours
(SentencePiece drops the first space; byte fallback turns a whole run of byte tokens into U+FFFD
if any of it is invalid). So a short window of tokens is decoded again for each new one, and only
text that no later token can change is let through.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import lru_cache
from os.path import commonprefix
from typing import NamedTuple, Protocol, Self, runtime_checkable

REPLACEMENT = "\ufffd"
# Tokens in front of the new ones that are decoded with them.
CONTEXT_TOKENS = 8
# The window is cut back to its context at this length. One that cannot be cut, as it ends in a
# long run of bytes without a character, is decoded less and less often: constant work a token.
MAX_WINDOW_TOKENS = 24
# Byte tokens come early in every vocabulary that has them.
NUM_TOKENS_SEARCHED_FOR_BYTES = 4096


@runtime_checkable
class TokenDecoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class StopMatch(NamedTuple):
    stop_string: str
    start: int
    end: int


class Detokenizer:
    """The text of one answer, growing token by token.

    visible_text: what a client may see. Only ever grows at its end. Held back are incomplete
        characters and text that could be the beginning of a stop string; after `finish()`
        nothing is, and decode(prompt + answer) == decode(prompt) + visible_text, unless it was
        cut by a stop string or the prompt ends within a character that the answer completes.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop_strings: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        self.visible_text = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop_strings = tuple(stop_strings)
        self._includes_stop = include_stop_str_in_output
        self._byte_token_id = find_byte_token(tokenizer)
        self._window = self._context(prompt_token_ids)
        # Text of the window that belongs to the prompt or was let through already.
        self._seen = self._decode(self._window)
        self._held = ""  # certain text that could be the beginning of a stop string
        self._next_decode_length = 0
        self._is_finished = False

    def append(self, token_id: int, *, is_stop_token: bool) -> str | None:
        """Take the next token; return the stop string that it completed, if any.

        The text of a stop token is part of the answer only with include_stop_str_in_output.
        """
        assert not self._is_finished, "a token came after the end of the answer"
        if is_stop_token and not self._includes_stop:
            return None
        self._window.append(token_id)
        if len(self._window) < self._next_decode_length:
            return None
        self._held += self._take_certain_text()
        # The answer may stop here, so search the text as it would be if it ended with this token.
        uncertain = self._unseen(self._decode(self._window)) if self._stop_strings else ""
        stop_string = self._cut_at_stop_string(self._held + uncertain.rstrip(REPLACEMENT))
        if stop_string is None:
            self._release()
            self._shorten_window()
        return stop_string

    def fork(self) -> Self:
        """An independent copy, for a sequence that goes on in another way."""
        copied = copy.copy(self)
        copied._window = list(self._window)
        return copied

    def finish(self) -> None:
        """Nothing more comes: let through what was held back."""
        if self._is_finished:
            return
        text = self._held + self._unseen(self._decode(self._window))
        if self._cut_at_stop_string(text) is None:
            self.visible_text += text
            self._is_finished = True

    def _take_certain_text(self) -> str:
        certain = self._certain_text(self._window)
        new_text = self._unseen(certain)
        if new_text:
            self._seen = certain
        return new_text

    def _cut_at_stop_string(self, text: str) -> str | None:
        """End the answer if `text`, all that is not visible yet, has a stop string."""
        match = find_stop_string(text, self._stop_strings)
        if match is None:
            return None
        self.visible_text += text[: match.end if self._includes_stop else match.start]
        self._is_finished = True
        return match.stop_string

    def _release(self) -> None:
        num_released = len(self._held) - longest_stop_prefix(self._held, self._stop_strings)
        self.visible_text += self._held[:num_released]
        self._held = self._held[num_released:]

    def _shorten_window(self) -> None:
        # While a character that the prompt began is open, what counts as seen is undecided.
        is_long = len(self._window) >= MAX_WINDOW_TOKENS
        if is_long and self._seen == self._certain_text(self._window):
            self._window = self._context(self._window)
            self._seen = self._certain_text(self._window)
        length = len(self._window)
        self._next_decode_length = length + 1 + length // MAX_WINDOW_TOKENS

    def _context(self, token_ids: Sequence[int]) -> list[int]:
        """A short tail of the tokens, after which others decode as they would after all of them.

        That is so once the tail has certain text: then the decoder is past what it does to the
        beginning of a text, and an unfinished run of bytes began within the tail.
        """
        num_tokens = CONTEXT_TOKENS
        while num_tokens < len(token_ids):
            tail = list(token_ids[-num_tokens:])
            if self._certain_text(tail):
                return tail
            num_tokens *= 2
        return list(token_ids)

    def _certain_text(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens that stays the same whatever token comes next.

        An incomplete byte as the next token spoils all that is still open, so it shows what is
        not: with byte fallback, "A" of the byte 0x41 and then 0x80 are "\\ufffd\\ufffd".
        """
        if self._byte_token_id is None:
            return self._decode(token_ids).rstrip(REPLACEMENT)
        text = self._decode([*token_ids, self._byte_token_id])
        if not text.endswith(REPLACEMENT):
            return ""  # by chance the byte completed a character: the next token will tell
        return text.rstrip(REPLACEMENT)

    def _unseen(self, window_text: str) -> str:
        if window_text.startswith(self._seen):
            return window_text[len(self._seen) :]
        # Either nothing new is certain, or the prompt ended within a character and this text
        # has it complete.
        return window_text[len(commonprefix([self._seen, window_text])) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


@lru_cache(maxsize=16)
def find_byte_token(tokenizer: TokenDecoder) -> int | None:
    """A token that is a part of a character only, or None in a vocabulary without such."""
    for token_id in range(NUM_TOKENS_SEARCHED_FOR_BYTES):
        try:
            text = tokenizer.decode([token_id], skip_special_tokens=True)
        except (LookupError, ValueError):  # some tokenizers refuse ids beyond their vocabulary
            return None
        if text == REPLACEMENT:
            return token_id
    return None


def find_stop_string(text: str, stop_strings: Iterable[str]) -> StopMatch | None:
    """The match that begins earliest; of those that begin there, the shortest.

    The shortest is also the one that would have matched first, had the text come in smaller
    pieces.
    """
    matches = [
        StopMatch(stop_string, start, start + len(stop_string))
        for stop_string in stop_strings
        if (start := text.find(stop_string)) >= 0
    ]
    return min(matches, key=lambda match: (match.start, match.end), default=None)


def longest_stop_prefix(text: str, stop_strings: Iterable[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    longest = 0
    for stop_string in stop_strings:
        start = text.find(stop_string[0], max(0, len(text) - len(stop_string) + 1))
        while start >= 0 and not stop_string.startswith(text[start:]):
            start = text.find(stop_string[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest
