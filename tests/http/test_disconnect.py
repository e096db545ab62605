"""A client that goes away: its requests end, whatever they were doing."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from jpaged.outputs import RequestOutput
from jpaged.server.streaming import EventStream, merge, unless_disconnected
from tests.http.conftest import RunningServer
from tests.http.scripted_engine import MAX_MODEL_LEN

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def send(server: RunningServer, path: str, body: dict[str, Any]) -> socket.socket:
    return send_to(server.port, path, body)


def send_to(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection whose request is sent, with a small buffer for the answer."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", port))
    connection.sendall(head.encode() + content)
    return connection


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def long_body(path: str, prompt: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": MAX_MODEL_LEN - 50, "ignore_eos": True}
    if path == CHAT:
        return {**body, "messages": [{"role": "user", "content": prompt}]}
    return {**body, "prompt": prompt}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt", "num_running"),
    [(COMPLETIONS, "hello", 1), (COMPLETIONS, ["hello", "you", "there"], 3), (CHAT, "hello", 1)],
)
def test_requests_of_a_client_that_left_are_aborted(
    server: RunningServer, path: str, prompt: Any, num_running: int, stream: bool
) -> None:
    """O-42: streamed and not; nothing runs on, and no more tokens are made."""
    engine = server.engine
    engine.seconds_per_token = 0.02
    for _ in range(5):
        connection = send(server, path, {**long_body(path, prompt), "stream": stream})
        wait_until(lambda: len(engine.running) == num_running, 5)
        connection.close()
        wait_until(lambda: not engine.running, 1)
    num_generated = engine.num_generated
    time.sleep(0.1)
    assert engine.num_generated == num_generated


def test_others_do_not_notice(server: RunningServer) -> None:
    """O-42"""
    server.engine.seconds_per_token = 0.01
    leaving = send(server, COMPLETIONS, {**long_body(COMPLETIONS, "leaving"), "stream": True})
    staying = send(server, COMPLETIONS, {"prompt": "staying", "max_tokens": 100})
    wait_until(lambda: len(server.engine.running) == 2, 5)
    leaving.close()
    with staying:
        answer = staying.recv(65536)
        while b"usage" not in answer:
            answer += staying.recv(65536)
    assert b'"text":"[staying]"' in answer


def test_a_client_that_leaves_while_it_sends(server: RunningServer) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    time.sleep(0.05)
    connection.close()
    assert server.post(COMPLETIONS, {"prompt": "ok"}).status_code == 200


def test_a_reader_that_stops_reading_and_leaves(server: RunningServer) -> None:
    """The stream waits in a send then, not in the engine; leaving ends it all the same."""
    engine = server.engine
    body = {"prompt": ["x"] * 20, "max_tokens": 450, "ignore_eos": True, "stream": True}
    with send(server, COMPLETIONS, body):
        num_generated = -1
        while engine.num_generated != num_generated:  # until the socket takes no more
            num_generated = engine.num_generated
            time.sleep(0.3)
        assert engine.running
    wait_until(lambda: not engine.running, 1)


# What follows needs no server.


async def counting(
    log: list[str], name: str, error: Exception | None = None
) -> AsyncGenerator[Any]:
    try:
        for number in range(3):
            await asyncio.sleep(0.001)
            yield f"{name}{number}"
        if error is not None:
            raise error
        if name == "endless":
            await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)  # a clean-up that waits must be let finish
        log.append(f"{name} closed")


async def collect(iterators: list[AsyncGenerator[RequestOutput]]) -> list[Any]:
    return [item async for item in merge(iterators)]


@pytest.mark.parametrize("num", [1, 2, 5])
def test_merge_gives_everything_and_closes(num: int) -> None:
    log: list[str] = []
    merged = asyncio.run(collect([counting(log, f"i{index}-") for index in range(num)]))
    for index in range(num):
        own = [item for number, item in merged if number == index]
        assert own == [f"i{index}-{number}" for number in range(3)]
    assert len(log) == num


@pytest.mark.parametrize("num_others", [0, 2])
def test_merge_ends_with_the_first_error(num_others: int) -> None:
    log: list[str] = []
    iterators = [counting(log, "bad", ValueError("oops"))]
    iterators += [counting(log, "endless") for _ in range(num_others)]
    with pytest.raises(ValueError, match="oops"):
        asyncio.run(asyncio.wait_for(collect(iterators), 5))
    assert len(log) == 1 + num_others


@pytest.mark.parametrize("num", [1, 3])
def test_closing_a_merge_closes_its_iterators(num: int) -> None:
    async def take_one() -> None:
        merged = merge([counting(log, "endless") for _ in range(num)])
        await anext(merged)
        await merged.aclose()

    log: list[str] = []
    asyncio.run(take_one())
    assert log == ["endless closed"] * num


async def never() -> Any:
    await asyncio.sleep(60)


async def leave_after(seconds: float) -> Any:
    await asyncio.sleep(seconds)
    return {"type": "http.disconnect"}


def test_work_ends_before_the_client_leaves() -> None:
    async def work() -> int:
        return 5

    async def fail() -> int:
        raise ValueError("oops")

    assert asyncio.run(unless_disconnected(never, work())) == 5
    with pytest.raises(ValueError, match="oops"):
        asyncio.run(unless_disconnected(never, fail()))


def test_work_is_cancelled_once_and_cleans_up() -> None:
    """O-42: a clean-up with several awaits is not cancelled again at each of them."""
    log = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for step in range(3):
                await asyncio.sleep(0.001)
                log.append(step)

    with pytest.raises(ClientDisconnect):
        asyncio.run(unless_disconnected(partial(leave_after, 0.01), work()))
    assert log == [0, 1, 2]


def test_an_event_stream_closes_its_events() -> None:
    """O-42: also when the client leaves while an event waits to be sent."""

    async def leave_while_sending() -> None:
        events = endless_events()
        stream = EventStream(events)
        await stream({"type": "http"}, partial(leave_after, 0.01), partial(block, sent))
        assert log == ["closed"]
        del events  # until here, so that nothing but the stream could have closed it

    async def endless_events() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            log.append("closed")

    async def block(sent: list[str], message: Any) -> None:
        sent.append(message["type"])
        await asyncio.sleep(0 if len(sent) < 3 else 60)

    log: list[str] = []
    sent: list[str] = []
    asyncio.run(leave_while_sending())
    assert sent == ["http.response.start", "http.response.body", "http.response.body"]


def test_a_cancelled_handler_cancels_its_work() -> None:
    log: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            log.append("closed")

    async def cancel_soon() -> None:
        handler = asyncio.create_task(unless_disconnected(never, work()))
        await asyncio.sleep(0.01)
        handler.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handler

    asyncio.run(cancel_soon())
    assert log == ["closed"]
