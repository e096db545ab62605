"""Roles of messages that a chat template may not know."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

DEVELOPER = "developer"
# The name as a string of the template's program, not a word of the text that it writes.
_NAMES_DEVELOPER = re.compile(rf"""(["']){DEVELOPER}\1""")


def with_known_roles(
    messages: Sequence[Mapping[str, Any]], chat_template: str
) -> list[dict[str, Any]]:
    """The messages, those of a developer as system messages if the template knows only these.

    OpenAI's developer messages take the place of system messages. A template that does not know
    them would drop them, or write a role that the model was not trained on.
    """
    if _NAMES_DEVELOPER.search(chat_template):
        return [dict(message) for message in messages]
    return [
        {**message, "role": "system"} if message["role"] == DEVELOPER else dict(message)
        for message in messages
    ]
