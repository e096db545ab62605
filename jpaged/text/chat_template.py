"""Which of a model's chat templates is used, and whether it is one at all."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerFast

from jpaged.errors import CheckpointError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
DEFAULT = "default"
_PROBE = [{"role": "user", "content": "Hello!"}]


def check_stored_templates(folder: Path) -> None:
    """Refuse a `chat_template` in tokenizer_config.json that is neither a text nor a list of
    named ones. transformers would fail without naming the file, or take the last of two."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return  # absent, or damaged: transformers says so
    stored = config.get("chat_template") if isinstance(config, dict) else None
    if stored is None or isinstance(stored, str):
        return
    if not isinstance(stored, list) or not all(map(_is_named_template, stored)):
        raise CheckpointError(
            f"chat_template in {folder / CONFIG_FILE} must be a text or a list of objects with "
            f"name and template, got {stored!r:.80}"
        )
    names = [each["name"] for each in stored]
    for name in names:
        if names.count(name) > 1:
            raise CheckpointError(
                f"chat_template in {folder / CONFIG_FILE} has two templates of the name {name!r}"
            )


def use_default_template(tokenizer: PreTrainedTokenizerFast, location: str) -> list[str]:
    """Leave the tokenizer with the template for plain chats, or without one.

    location: the file that has the template, for messages. Returns the names of templates for
    other uses. Raises `CheckpointError` when the template for plain chats is no valid Jinja.
    """
    templates: Any = tokenizer.chat_template or {}
    if not isinstance(templates, Mapping):
        templates = {DEFAULT: templates}
    tokenizer.chat_template = templates.get(DEFAULT) or None
    if tokenizer.chat_template is not None:
        _check_syntax(tokenizer, location)
    return sorted(set(templates) - {DEFAULT})


def template_location(folder: Path) -> str:
    """The file of a folder that transformers takes the template for plain chats from."""
    has_file = (folder / TEMPLATE_FILE).is_file()
    return str(folder / (TEMPLATE_FILE if has_file else CONFIG_FILE))


def _is_named_template(entry: object) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) for key in ("name", "template")
    )


def _check_syntax(tokenizer: PreTrainedTokenizerFast, location: str) -> None:
    """Templates are compiled when they are first used, with transformers' extensions of Jinja."""
    try:
        tokenizer.apply_chat_template(_PROBE, tokenize=False)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template in {location} is no valid Jinja template: {error} "
            f"(line {error.lineno})"
        ) from error
    except Exception:
        pass  # a template may refuse such a chat: that is for those to learn who send one
