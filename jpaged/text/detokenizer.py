"""Token ids in, text out: as early as it is certain, and cut at stop strings. Imports no JAX.

Decoding token by token is wrong: a character can span tokens, and decoders look at neighbours
(SentencePiece drops the first space; byte fallback turns a whole run of byte tokens into U+FFFD
if any of it is invalid). So a short window of tokens is decoded again for each new one, and only
text that no later token can change is let through.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from os.path import commonprefix
from typing import Protocol, Self, runtime_checkable

from jpaged.text.stop_strings import Mark, StopStrings

REPLACEMENT = "\ufffd"
# Tokens in front of the new ones that are decoded with them.
CONTEXT_TOKENS = 8
# The window is cut back to its context at this length. One that cannot be cut, as it ends in a
# long run of bytes without a character, is decoded less and less often: constant work a token.
MAX_WINDOW_TOKENS = 24
# Most tokens of a prompt that are decoded at all: by far more than texts have bytes in a row.
MAX_PROMPT_CONTEXT_TOKENS = 256
MAX_CHARACTER_BYTES = 4
# Byte tokens come early in every vocabulary that has them.
NUM_TOKENS_SEARCHED_FOR_BYTES = 4096


@runtime_checkable
class TokenDecoder(Protocol):
    """The part of a tokenizer that detokenizing needs. special_tokens: their texts, by id."""

    @property
    def special_tokens(self) -> Mapping[int, str]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """The text of one answer, growing token by token.

    visible_text: what a client may see. Only ever grows at its end. Held back are incomplete
        characters and text that could be the beginning of a stop string; after `finish()`
        nothing is, and decode(prompt + answer) == decode(prompt) + visible_text, unless it was
        cut by a stop string, the prompt ends within a character that the answer completes, or it
        ends with more than MAX_PROMPT_CONTEXT_TOKENS bytes in a row.

    A stop string may contain special tokens, also where skip_special_tokens leaves them out.
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
        # Special tokens that are left out: they change no text, and are not decoded.
        self._skipped_tokens = tokenizer.special_tokens if skip_special_tokens else {}
        self._stops = StopStrings(stop_strings, self._skipped_tokens)
        self._includes_stop = include_stop_str_in_output
        self._byte_token_id = find_byte_token(tokenizer)
        self._window = self._prompt_context(prompt_token_ids)
        # Text of the window that belongs to the prompt or was let through already.
        self._seen = self._decode(self._window)
        self._held = ""  # certain text that could be the beginning of a stop string
        self._marks: list[Mark] = []  # hidden special tokens, by their place after `_held` begins
        self._next_decode_length = 0
        self._is_finished = False

    def append(self, token_id: int, *, is_stop_token: bool) -> str | None:
        """Take the next token; return the stop string that it completed, if any.

        The text of a stop token is part of the answer only with include_stop_str_in_output.
        """
        assert not self._is_finished, "a token came after the end of the answer"
        if is_stop_token and not self._includes_stop:
            return None
        hidden_text = self._stops.hidden_tokens.get(token_id)
        if token_id not in self._skipped_tokens:
            self._window.append(token_id)
        elif hidden_text is None:
            return None
        if len(self._window) < self._next_decode_length and hidden_text is None:
            return None
        self._held += self._take_certain_text()
        # The answer may stop here, so search the text as it would be if it ended with this token.
        uncertain = self._unseen(self._decode(self._window)) if self._stops else ""
        text = self._held + uncertain.rstrip(REPLACEMENT)
        if hidden_text is not None:
            self._marks.append(Mark(len(self._held) + len(uncertain), hidden_text))
        stop_string = self._cut_at_stop_string(text)
        if stop_string is None:
            self._release()
            self._shorten_window()
        return stop_string

    def fork(self) -> Self:
        """An independent copy, for a sequence that goes on in another way."""
        copied = copy.copy(self)
        copied._window = list(self._window)
        copied._marks = list(self._marks)
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
        match = self._stops.find(text, self._marks)
        if match is None:
            return None
        self.visible_text += text[: match.start]
        if self._includes_stop:
            self.visible_text += match.stop_string
        self._is_finished = True
        return match.stop_string

    def _release(self) -> None:
        num_held, self._marks = self._stops.num_held(self._held, self._marks)
        num_released = len(self._held) - num_held
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

    def _prompt_context(self, token_ids: Sequence[int]) -> list[int]:
        """A short tail of the prompt for `_context`, bounded, so that long prompts cost no more.

        Where the prompt ends with a longer run of byte tokens, the tail begins with a whole
        character if it can, as byte fallback would take the run for invalid otherwise.
        """
        with_text = (each for each in reversed(token_ids) if each not in self._skipped_tokens)
        end = list(islice(with_text, MAX_PROMPT_CONTEXT_TOKENS))
        context = self._context(end[::-1])
        if len(context) < MAX_PROMPT_CONTEXT_TOKENS:
            return context
        tails = (context[start:] for start in range(MAX_CHARACTER_BYTES))
        aligned = (tail for tail in tails if not self._decode(tail).startswith(REPLACEMENT))
        return next(aligned, context)

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
