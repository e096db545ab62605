"""Refuses texts that cannot fit by their length alone, as tokenizing megabytes takes seconds."""

from collections.abc import Iterable, Mapping
from typing import Any

from jpaged.errors import PromptTooLongError
from jpaged.text.tokenizer import Tokenizer


def check_text_length(
    num_characters: int, tokenizer: Tokenizer, max_model_len: int, *, param: str
) -> None:
    """Raises `PromptTooLongError` that names `param` if no `max_model_len` tokens can cover a text
    of so many characters."""
    most_characters = max_model_len * tokenizer.longest_token_length
    if num_characters > most_characters:
        raise PromptTooLongError(
            f"{param} has {num_characters} characters, more than any {max_model_len} tokens, the "
            f"model's context, can have ({most_characters}). Shorten it.",
            param=param,
        )


def num_characters(messages: Iterable[Any]) -> int:
    """Characters of all contents of a chat. What is no message counts nothing: its template or
    the checks before that refuse it."""
    contents = [each.get("content") for each in messages if isinstance(each, Mapping)]
    parts = [part for content in contents for part in _parts(content)]
    return sum(len(part) for part in parts if isinstance(part, str))


def _parts(content: Any) -> list[Any]:
    """[{"type": "text", "text": "a"}, ...] -> ["a", ...]; "a" -> ["a"]"""
    if not isinstance(content, list):
        return [content]
    return [part.get("text") for part in content if isinstance(part, Mapping)]
