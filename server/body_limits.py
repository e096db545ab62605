"""Limits memory and time of request bodies, as pure ASGI middleware."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jpaged.server.errors import OverloadedError, RequestTimeoutError


class LimitBodies:
    """Limits the bytes of all bodies together, and the seconds that each may take to arrive.

    Bytes count from their arrival to the end of the response, since prompts are held that long.

    Reading a body raises `RequestTimeoutError` or `OverloadedError`, which the routes let pass to
    the handlers of errors.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _Body(self, receive)
        try:
            await self._app(scope, body.receive, send)
        finally:
            self._num_bytes -= body.num_bytes

    def take(self, size: int) -> None:
        if self._num_bytes + size > self._max_bytes:
            raise OverloadedError(
                f"the bodies of all requests together exceed {self._max_bytes} bytes; try again "
                "later, or start the server with a larger --max-body-bytes-in-flight"
            )
        self._num_bytes += size

    async def in_time(self, receive: Receive, deadline: float) -> Message:
        try:
            async with asyncio.timeout_at(deadline):
                return await receive()
        except TimeoutError:
            raise RequestTimeoutError(
                f"the body did not arrive within {self._timeout:g} seconds; send it faster, or "
                "start the server with a larger --body-timeout"
            ) from None

    def deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._timeout


class _Body:
    """The body of one request. Its time limit ends with it: a disconnect may come at any time."""

    def __init__(self, limits: LimitBodies, receive: Receive) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._receive = receive
        self._deadline = limits.deadline()
        self._has_ended = False

    async def receive(self) -> Message:
        if self._has_ended:
            return await self._receive()
        message = await self._limits.in_time(self._receive, self._deadline)
        size = len(message.get("body", b""))
        self._limits.take(size)
        self.num_bytes += size
        self._has_ended = not message.get("more_body", False)
        return message
