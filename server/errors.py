"""Maps exceptions to status and body of the response, in one table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from jpaged.errors import EngineDeadError, JpagedError, PromptTooLongError, RequestError
from jpaged.server.json_response import JsonResponse
from jpaged.server.protocol import ErrorBody

CLIENT_CLOSED_REQUEST = 499  # never sent: nobody is left to read it


class BodyError(RequestError):
    """The body is no JSON object of the right form. code: OpenAI's name of the mistake."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


class BodyTooLargeError(RequestError):
    """The body has more bytes than the server reads."""


class MediaTypeError(RequestError):
    """The body is not declared to be JSON."""


class RequestTimeoutError(RequestError):
    """The head or the body of the request did not arrive in time."""


class UnauthorizedError(RequestError):
    """The server wants an API key, and the request has none or another."""


class OriginError(RequestError):
    """The request comes from a web page whose site is not allowed to use the server."""


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""


class UnavailableError(JpagedError):
    """The server takes no requests now: it starts, or it shuts down."""


class OverloadedError(JpagedError):
    """The server has as much to do as it takes on; a later try may succeed."""


class GenerationError(JpagedError):
    """The engine ended this request with an error, and goes on with others."""


@dataclass(frozen=True)
class ErrorKind:
    status: int
    type: str
    code: str | None
    headers: Mapping[str, str] = field(default_factory=dict)


RETRY_AFTER = {"Retry-After": "5"}

# The first class that an error is an instance of decides.
ERROR_KINDS: tuple[tuple[type[Exception], ErrorKind], ...] = (
    (BodyTooLargeError, ErrorKind(413, "invalid_request_error", "request_too_large")),
    (MediaTypeError, ErrorKind(415, "invalid_request_error", "unsupported_media_type")),
    (
        # The rest of the request may never come, so the connection is of no more use.
        RequestTimeoutError,
        ErrorKind(408, "invalid_request_error", "request_timeout", {"Connection": "close"}),
    ),
    (
        UnauthorizedError,
        ErrorKind(401, "invalid_request_error", "invalid_api_key", {"WWW-Authenticate": "Bearer"}),
    ),
    (OriginError, ErrorKind(403, "invalid_request_error", "origin_not_allowed")),
    (ModelNotFoundError, ErrorKind(404, "invalid_request_error", "model_not_found")),
    (PromptTooLongError, ErrorKind(400, "invalid_request_error", "context_length_exceeded")),
    (RequestError, ErrorKind(400, "invalid_request_error", None)),
    (UnavailableError, ErrorKind(503, "server_error", "unavailable")),
    (OverloadedError, ErrorKind(503, "server_error", "overloaded", RETRY_AFTER)),
    (EngineDeadError, ErrorKind(503, "server_error", "engine_dead")),
    (GenerationError, ErrorKind(500, "server_error", "generation_failed")),
    (JpagedError, ErrorKind(500, "server_error", "internal_error")),
)
# Its message might tell one client about another's request: it goes to the log only.
UNEXPECTED = ErrorKind(500, "server_error", "internal_error")
UNEXPECTED_MESSAGE = "internal error; the server's log says more"


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(JpagedError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)


def error_kind(error: Exception) -> ErrorKind:
    for error_class, kind in ERROR_KINDS:
        if isinstance(error, error_class):
            return kind
    return UNEXPECTED


def error_body(error: Exception) -> ErrorBody:
    kind = error_kind(error)
    message = UNEXPECTED_MESSAGE if kind is UNEXPECTED else str(error) or type(error).__name__
    code = getattr(error, "code", None) if isinstance(error, BodyError) else None
    return _body(message, kind.type, getattr(error, "param", None), code or kind.code)


def error_response(error: Exception) -> Response:
    kind = error_kind(error)
    return JsonResponse(error_body(error), kind.status, kind.headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """The framework's own errors: no such path, no such method on this path."""
    assert isinstance(error, HTTPException)
    path = f"{request.scope['path']:.200}"
    headers: Mapping[str, str] | None = error.headers
    if error.status_code == 404:
        body = _body(f"unknown path {path}", "invalid_request_error", None, "unknown_url")
    elif error.status_code == 405:
        message = f"{path} does not take the method {request.method}"
        body = _body(message, "invalid_request_error", None, "method_not_supported")
    else:
        body = _body(error.detail or "error", "invalid_request_error", None, None)
    return JsonResponse(body, error.status_code, headers)


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
