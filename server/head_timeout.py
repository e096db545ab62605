"""Limits the time that the head of a request may take to arrive."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jpaged.server.errors import RequestTimeoutError, error_response


class HeadTimeoutProtocol(H11Protocol):
    """uvicorn's protocol, which by itself waits without limit for the rest of a request's head.

    The time runs from the beginning of a connection, or from the first byte that follows an
    answer, until the head of the next request is complete. An idle connection sends no such byte:
    its limit is uvicorn's `timeout_keep_alive`. A body that is still being sent after its request
    was answered does, so its connection ends, too, unless the next request comes in time.
    """

    head_timeout: float  # seconds; set by a subclass, since uvicorn makes the objects
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._start_timer()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        """Leave a running timer alone: single bytes now and then win no time."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout, self._end_connection)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_connection(self) -> None:
        """Close the connection, after an answer to a client that has sent a part of a head.

        A client that has sent nothing, such as a browser that connects ahead, could take an answer
        for that to its next request.
        """
        has_part_of_head = self.conn.our_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if has_part_of_head and not self.transport.is_closing():
            self._send_timeout_error()
        self.timeout_keep_alive_handler()

    def _send_timeout_error(self) -> None:
        response = error_response(
            RequestTimeoutError(
                "the request line and the headers did not arrive within "
                f"{self.head_timeout:g} seconds; send them faster, or start the server with a "
                "larger --head-timeout"
            )
        )
        head = h11.Response(status_code=response.status_code, headers=response.raw_headers)
        for event in (head, h11.Data(data=response.body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))


def protocol_with(head_timeout: float) -> type[HeadTimeoutProtocol]:
    """The protocol class that waits `head_timeout` seconds for the head of a request."""
    return type("Protocol", (HeadTimeoutProtocol,), {"head_timeout": head_timeout})
