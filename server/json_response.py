"""The one way in which answers and events become JSON."""

from typing import Any

from pydantic_core import to_json
from starlette.responses import Response


def json_bytes(value: Any) -> bytes:
    """UTF-8, several times as fast as `json`. What JSON has no number for becomes null."""
    return to_json(value, inf_nan_mode="null")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
