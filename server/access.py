"""Access control, as pure ASGI middleware: streams and disconnects pass through unchanged."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.server.api_keys import ApiKeys
from jpaged.server.errors import OriginError, UnauthorizedError, error_response

# For load balancers and orchestrators, which have no keys.
OPEN_PATHS = frozenset({"/health", "/ping"})


class RefuseOtherSites:
    """Refuses requests of web pages, unless their site is allowed.

    Browsers add `Origin` to what pages send to other sites, and to every POST. Without this check a
    page that somebody visits could use a server on their own machine, also through a host name that
    resolves to it (DNS rebinding). Other clients send no `Origin`. The `Host` is not
    checked: behind a proxy it can be anything.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = set(Headers(scope=scope).getlist("origin")) - self._allowed
        if refused and "*" not in self._allowed:
            error = OriginError(
                f"web pages of {refused.pop()!r:.200} may not use this server; start it with "
                "--allowed-origins and that origin to allow them"
            )
            await error_response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class RequireApiKey:
    """Refuses requests without one of the keys, on all paths but `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = _bearer_token(scope)
        if _path(scope) in OPEN_PATHS or (shown is not None and self._keys.accepts(shown)):
            await self._app(scope, receive, send)
            return
        what = "the API key is wrong" if shown is not None else "an API key is needed"
        error = UnauthorizedError(f"{what}: send a header 'Authorization: Bearer KEY'")
        await error_response(error)(scope, receive, send)


class CloseWhileDraining:
    """Tells clients of a server that shuts down to connect anew for their next request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and scope["app"].state.is_draining:
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_closing)


class ServeUnderPrefix:
    """Serves each path with and without a prefix, which proxies may pass on or strip."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._prefix}, receive, send)


def _bearer_token(scope: Scope) -> bytes | None:
    values = Headers(scope=scope).getlist("authorization")
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(" ")
    return token.strip().encode("latin-1") if scheme.lower() == "bearer" else None


def _path(scope: Scope) -> str:
    """Return the path without the prefix of a proxy."""
    root = scope.get("root_path", "")
    path = scope["path"]
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
