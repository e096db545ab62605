"""Reads the body of a request into one of the models of the wire format."""

import reprlib
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from jpaged.server.errors import BodyError, BodyTooLargeError, MediaTypeError
from jpaged.server.request_threads import LARGE, RequestThreads

MAX_BODY_BYTES = 16 * 1024 * 1024

Model = TypeVar("Model", bound=BaseModel)

# pydantic's words for what is wrong -> OpenAI's
_CODES = {
    "missing": "missing_required_parameter",
    "unknown_parameter": "unknown_parameter",
    "unsupported_parameter": "unsupported_parameter",
    "too_long": "array_above_max_length",
    "too_short": "array_below_min_length",
}


async def read_request(request: Request, model: type[Model]) -> Model:
    """Read and validate the body. Raises `RequestError` that names the first wrong field."""
    _check_media_type(request.headers.get("content-type"))
    body = await _read_body(request)
    if len(body) < LARGE:
        return _parse(body, model)
    threads: RequestThreads = request.app.state.threads
    return await threads.run(len(body), _parse, body, model)


def _parse(body: bytearray, model: type[Model]) -> Model:
    values = _parse_json(body)
    if not isinstance(values, dict):
        raise BodyError(
            f"the body must be a JSON object, got a {type(values).__name__}", code="invalid_type"
        )
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _body_error(error) from None


def _check_media_type(content_type: str | None) -> None:
    """Refuse types other than JSON, which pages of other sites may post without a preflight."""
    content_type = content_type or "none"
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise MediaTypeError(
            f"the body must be application/json, got content type {content_type!r:.100}; "
            "with curl, add -H 'Content-Type: application/json'"
        )


async def _read_body(request: Request) -> bytearray:
    """Read the body up to the limit, even if the declared length is wrong."""
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise BodyTooLargeError(f"the body has {declared} bytes; at most {MAX_BODY_BYTES} are read")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body has more than {MAX_BODY_BYTES} bytes")
    return body


def _parse_json(body: bytearray) -> Any:
    try:
        return from_json(body)
    except ValueError as error:
        raise BodyError(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _body_error(error: ValidationError) -> BodyError:
    first = error.errors(include_url=False)[0]
    kind = first["type"]
    location = _location((*first["loc"], *_named_field(first.get("ctx"))))
    # pydantic's sentences start with "Input should", ours go on after the name of the field.
    words = "is required" if kind == "missing" else first["msg"]
    message = f"{location} {words.removeprefix('Input ').removeprefix('List ')}"
    if kind not in _CODES:
        message += f", got {reprlib.repr(first['input'])}"
    return BodyError(message, param=location, code=_CODES.get(kind, "invalid_value"))


def _named_field(context: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the field that an error of a whole object names."""
    field = (context or {}).get("field")
    return () if field is None else (f"{field:.100}",)


def _location(parts: Sequence[int | str]) -> str:
    """("messages", 0, "role") -> "messages[0].role" """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")
