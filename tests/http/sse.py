"""Reads server-sent events strictly."""

import json
from typing import Any

DONE = "[DONE]"


def parse_events(body: bytes) -> list[Any]:
    """The JSON of each event; the text [DONE] stays text. Raises on anything but `data: ...`."""
    text = body.decode()
    assert text.endswith("\n\n"), "the last event is cut"
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: ") and "\n" not in event, f"no event: {event!r}"
        data = event.removeprefix("data: ")
        events.append(data if data == DONE else json.loads(data))
    return events
