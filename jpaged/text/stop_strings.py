"""Where stop strings end a text, and how much of its end could be the beginning of one.

A stop string may contain special tokens, which the text leaves out. They are remembered as marks,
by their place in the text, and put back for the search.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    stop_string: str
    start: int
    end: int


class Mark(NamedTuple):
    """A special token that the text leaves out. offset: where in the text it would be."""

    offset: int
    text: str


class StopStrings:
    """The stop strings of one answer.

    skipped_tokens: special tokens that the text leaves out, by id.
    hidden_tokens: those of them that some stop string contains.
    """

    def __init__(self, strings: Sequence[str], skipped_tokens: Mapping[int, str]) -> None:
        self._strings = tuple(strings)
        self.hidden_tokens = {
            token_id: text
            for token_id, text in (skipped_tokens.items() if strings else ())
            if text and any(text in string for string in strings)
        }
        hidden = set(self.hidden_tokens.values())
        self._with_hidden = tuple(
            string for string in self._strings if any(text in string for text in hidden)
        )

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str, marks: Sequence[Mark]) -> StopMatch | None:
        """The match that begins earliest, by its place in the text without the marks."""
        plain = find_stop_string(text, self._strings)
        if not marks:
            return plain
        hidden = find_stop_string(_with_marks(text, marks), self._with_hidden)
        if hidden is None:
            return plain
        if plain is not None:
            marked_start = plain.start + sum(
                len(mark.text) for mark in marks if mark.offset <= plain.start
            )
            if (marked_start, len(plain.stop_string)) <= (hidden.start, len(hidden.stop_string)):
                return plain
        start = min(_text_offset(hidden.start, marks), len(text))
        return StopMatch(hidden.stop_string, start, start + len(hidden.stop_string))

    def num_held(self, text: str, marks: Sequence[Mark]) -> tuple[int, list[Mark]]:
        """Length of the end of `text` that could be the beginning of a stop string, and the marks
        that are still of use, with offsets in that end."""
        num_free = len(text) - longest_stop_prefix(text, self._strings)
        if not marks:
            return len(text) - num_free, []
        here = [mark for mark in marks if mark.offset <= len(text)]
        marked = _with_marks(text, here)
        first_held = len(marked) - longest_stop_prefix(marked, self._with_hidden)
        num_free = min(num_free, _text_offset(first_held, here))
        kept, shift = [], 0
        for mark in marks:
            shift += len(mark.text)
            if mark.offset > num_free or mark.offset + shift > first_held:
                kept.append(Mark(mark.offset - num_free, mark.text))
        return len(text) - num_free, kept


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


def _with_marks(text: str, marks: Sequence[Mark]) -> str:
    parts, end = [], 0
    for mark in marks:
        parts += [text[end : mark.offset], mark.text]
        end = mark.offset
    return "".join([*parts, text[end:]])


def _text_offset(marked_offset: int, marks: Sequence[Mark]) -> int:
    """The place in the text of one in the text with marks; that of a mark where it is inside."""
    shift = 0
    for mark in marks:
        if marked_offset < mark.offset + shift + len(mark.text):
            return min(marked_offset - shift, mark.offset)
        shift += len(mark.text)
    return marked_offset - shift
