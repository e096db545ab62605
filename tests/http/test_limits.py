"""No request takes what others need: bodies, queue, and texts that cannot fit."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from jpaged.server import body as body_module
from jpaged.server.options import ServerOptions
from tests.http.conftest import RunningServer, running_server
from tests.http.scripted_engine import MAX_MODEL_LEN, ScriptedEngine
from tests.http.test_disconnect import send_to, wait_until

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def begin_post(server: RunningServer, content: bytes, declared: int) -> socket.socket:
    """A connection that sends the beginning of a body."""
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {declared}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(head.encode() + content)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(4096):
        received += part
    return received


def read_until(connection: socket.socket, last: bytes) -> None:
    received = b""
    while last not in received:
        part = connection.recv(4096)
        assert part, f"ended after {received!r}"
        received += part


def assert_told_to_come_back(response: httpx.Response) -> None:
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert response.json()["error"]["code"] == "overloaded"


def test_a_body_that_does_not_arrive_in_time(tmp_path: Path) -> None:
    """The connection ends, however slowly bytes still come."""
    options = ServerOptions(body_timeout=0.2)
    with running_server(ScriptedEngine(tmp_path), options) as server:
        with begin_post(server, b'{"prompt": ', 100) as connection:
            received = read_to_end(connection)
        head, _, content = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower()
        error = json.loads(content)["error"]
        assert error["code"] == "request_timeout" and "--body-timeout" in error["message"]
        # The time is for the body only: answers may take longer.
        server.engine.seconds_per_token = 0.15
        assert server.post(COMPLETIONS, {"prompt": "a"}).status_code == 200


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@contextmanager
def connected(server: RunningServer, content: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(content)
        yield connection


def trickle(connection: socket.socket) -> None:
    """Send a byte now and then. Raises `OSError` when the server has closed the connection."""
    for _ in range(500):
        connection.sendall(b"x")
        time.sleep(0.02)


def test_a_head_that_does_not_arrive_in_time(tmp_path: Path) -> None:
    """The connection ends, however slowly bytes still come, and on a second request, too."""
    options = ServerOptions(head_timeout=0.5)
    with running_server(ScriptedEngine(tmp_path), options) as server:
        with (
            connected(server, b"") as silent,
            connected(server, HEALTH) as first,
            connected(server, HEALTH + b"\r\n") as second,
            connected(server, HEALTH + b"X-Long: ") as slow,
        ):
            read_until(second, b'"ok"')
            second.sendall(HEALTH)
            assert read_to_end(silent) == b""
            for connection in first, second:
                head, _, content = read_to_end(connection).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 408") and b"connection: close" in head.lower()
                error = json.loads(content)["error"]
                assert error["code"] == "request_timeout" and "--head-timeout" in error["message"]
            with pytest.raises(OSError):
                trickle(slow)
        # Bytes of a body that was answered already keep no connection, either.
        unread_body = b"POST /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        with connected(server, unread_body) as connection, pytest.raises(OSError):
            trickle(connection)


def test_only_heads_have_the_time_of_heads(tmp_path: Path) -> None:
    """Bodies, answers and the pause between requests may take longer."""
    options = ServerOptions(head_timeout=0.5)
    with running_server(ScriptedEngine(tmp_path), options) as server:
        server.engine.seconds_per_token = 0.25
        body = json.dumps({"prompt": "a", "stream": True}).encode()
        with begin_post(server, body[:5], len(body)) as connection:
            time.sleep(0.8)
            connection.sendall(body[5:])
            read_until(connection, b"data: [DONE]")
            time.sleep(0.8)
            connection.sendall(HEALTH + b"Connection: close\r\n\r\n")
            assert b'"ok"' in read_to_end(connection)


def test_bodies_of_all_requests_together(tmp_path: Path) -> None:
    """Only bytes that have come count, and only while their request is there."""
    options = ServerOptions(max_body_bytes_in_flight=1000)
    with running_server(ScriptedEngine(tmp_path), options) as server:
        body = {"prompt": "a" * 200}
        with begin_post(server, b"x" * 900, 950):
            wait_until(lambda: server.post(COMPLETIONS, body).status_code == 503, 10)
            assert_told_to_come_back(server.post(COMPLETIONS, body))
            assert server.post(COMPLETIONS, {"prompt": "a"}).status_code == 200
        wait_until(lambda: server.post(COMPLETIONS, body).status_code == 200, 10)
        for _ in range(10):
            assert server.post(COMPLETIONS, body).status_code == 200


def test_a_full_queue(tmp_path: Path) -> None:
    """Those that wait for their first token are counted, and no more when it is there."""
    options = ServerOptions(max_queued_requests=2)
    with running_server(ScriptedEngine(tmp_path), options) as server:
        queue = server.app.state.queue
        server.engine.seconds_per_token = 60
        body = {"prompt": ["a", "b", "c"], "stream": True}
        with send_to(server.port, COMPLETIONS, body):
            # More prompts than may wait: alone they are taken.
            wait_until(lambda: len(server.engine.running) == 3, 10)
            assert queue.num_waiting == 3
            assert_told_to_come_back(server.post(COMPLETIONS, {"prompt": "a"}))
            assert_told_to_come_back(server.post(CHAT, {"messages": []}))
            with server.client() as client:
                assert client.get("/health").status_code == 200
        wait_until(lambda: not server.engine.running, 10)
        assert queue.num_waiting == 0
        server.engine.seconds_per_token = 0.01
        long = {"prompt": ["a", "b", "c"], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with send_to(server.port, COMPLETIONS, long):
            wait_until(lambda: server.engine.num_generated > 3, 10)
            wait_until(lambda: queue.num_waiting == 0, 10)
            assert server.post(COMPLETIONS, {"prompt": "a"}).status_code == 200
        assert server.post(COMPLETIONS, {"prompt": ""}).status_code == 400
        assert queue.num_waiting == 0


def words(num_characters: int) -> str:
    return "a b " * (num_characters // 4)


# A byte tokenizer's longest token is a special one of a few characters.
MANY = 2**20
LONG_CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": words(MANY)}],
    [{"role": "user", "content": "x" * MANY}],
    [{"role": "user", "content": "<|im_end|>" * (MANY // 10)}],
    [{"role": "user", "content": words(MANY // 2000)}] * 2000,
    [{"role": "user", "content": [{"type": "text", "text": words(MANY // 100)}] * 100}],
]


@pytest.mark.parametrize("messages", LONG_CHATS)
def test_chats_that_cannot_fit_are_not_tokenized(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, messages: Any
) -> None:
    """O-72: nor rendered."""
    calls = []
    tokenizer = server.engine.tokenizer
    for name in ("encode", "render_chat"):
        monkeypatch.setattr(tokenizer, name, lambda *_, **__: calls.append(1))
    for path, body in [(CHAT, {"messages": messages}), (COMPLETIONS, {"prompt": words(MANY)})]:
        response = server.post(path, body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] in ("messages", "prompt")
        assert str(MAX_MODEL_LEN) in error["message"]
    assert not calls


def test_large_work_holds_up_neither_the_loop_nor_small_work(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-72: while one large body is parsed, others wait for it, and small requests do not."""
    may_go_on, parsing, most = threading.Event(), [], []
    parse_json = body_module._parse_json

    def slow_parse(content: bytearray) -> Any:
        if len(content) > body_module.LARGE:
            parsing.append(1)
            most.append(len(parsing))
            assert may_go_on.wait(10)
            parsing.pop()
        return parse_json(content)

    monkeypatch.setattr(body_module, "_parse_json", slow_parse)
    large = {"prompt": "x" * 2 * body_module.LARGE}
    connections = [send_to(server.port, COMPLETIONS, large) for _ in range(6)]
    try:
        wait_until(lambda: bool(parsing), 10)
        with server.client() as client:
            assert client.get("/health").status_code == 200
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert server.post(CHAT, chat).status_code == 200
        may_go_on.set()
        for connection in connections:
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    finally:
        may_go_on.set()
        for connection in connections:
            connection.close()
    assert most == [1] * 6
