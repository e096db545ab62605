"""The life of a server process, with the scripted engine: starting, draining, stopping."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from jpaged.server import run as run_module
from jpaged.server.app import create_app
from jpaged.server.options import ServerOptions
from jpaged.server.run import SignalledServer
from tests.http.scripted_engine import ScriptedEngine
from tests.http.sse import DONE, parse_events
from tests.http.test_disconnect import send_to, wait_until

SERVER = """
import asyncio, sys, tempfile
from pathlib import Path

import jpaged.server.run
from jpaged.cli.main import main
from tests.http.conftest import small_buffered
from tests.http.scripted_engine import ScriptedEngine

start_seconds, start_error, death = float(sys.argv[1]), sys.argv[2], sys.argv[3]

class Engine(ScriptedEngine):
    def __init__(self, config):
        super().__init__(Path(tempfile.mkdtemp()))
        self.is_ready = False
        self.seconds_per_token = 0.02
        self.model_name = config.served_model_name or self.model_name

    async def start(self):
        await asyncio.sleep(start_seconds)
        if start_error:
            raise jpaged.errors.CheckpointError(start_error)
        self.is_ready = True
        if death:
            self.dead = jpaged.errors.EngineDeadError(death)

listen = jpaged.server.run.listen
jpaged.server.run.listen = lambda *address: [small_buffered(each) for each in listen(*address)]
jpaged.server.run.AsyncEngine = Engine
sys.exit(main(["serve", *sys.argv[4:]]))
"""


@dataclass
class Process:
    popen: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def status(self) -> int:
        try:
            return httpx.get(f"{self.url}/health").status_code
        except httpx.TransportError:
            return 0


@contextmanager
def served(
    *options: str, start_seconds: float = 0, start_error: str = "", death: str = ""
) -> Iterator[Process]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [str(start_seconds), start_error, death, "--port", str(port)]
    command = [sys.executable, "-c", SERVER, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as popen:
        try:
            yield Process(popen, port)
        finally:
            popen.kill()


def long_stream(process: Process, **body: Any) -> Any:
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True, **body}
    return httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=30)


def test_start_serve_and_drain() -> None:
    """O-60: health follows; requests that come while others finish get 503; an idle connection
    does not hold up the end."""
    with (
        served("--served-model-name", "mine", start_seconds=0.5) as process,
        httpx.Client(base_url=process.url) as idle,
    ):
        wait_until(lambda: process.status() == 503, 30)
        wait_until(lambda: process.status() == 200, 30)
        assert idle.get("/v1/models").json()["data"][0]["id"] == "mine"
        with long_stream(process, max_tokens=100) as response:
            parts = response.iter_bytes()
            received = next(parts)
            process.popen.send_signal(signal.SIGTERM)
            wait_until(lambda: process.status() == 503, 2)
            refused = httpx.post(f"{process.url}/v1/completions", json={"prompt": "a"})
            assert refused.json()["error"]["message"] == "the server is shutting down"
            received += b"".join(parts)
        *chunks, last = parse_events(received)
        assert last == DONE and len(chunks) == 100
        assert process.popen.wait(10) == 0
        assert process.popen.stdout is not None
        printed = process.popen.stdout.read()
        assert f"mine at {process.url}/v1" in printed
        assert "curl" in printed and '"model": "mine"' in printed


def test_an_engine_that_cannot_start() -> None:
    """O-62: one line and exit code 2, though the server was up already."""
    with served("--api-key", "hush", start_error="model.safetensors is truncated") as process:
        assert process.popen.wait(60) == 2
        assert process.popen.stderr is not None
        lines = process.popen.stderr.read().splitlines()
        assert lines[-1] == "jpaged serve: error: model.safetensors is truncated"
        assert not any("Traceback" in line or "hush" in line for line in lines)


def test_requests_that_take_too_long_get_an_error() -> None:
    """O-60: at the end of the time-out; a client that does not read cannot keep the server."""
    with served("--shutdown-timeout", "0.5") as process:
        wait_until(lambda: process.status() == 200, 60)
        body = {"prompt": ["x"] * 200, "max_tokens": 400, "stream": True, "ignore_eos": True}
        not_read = send_to(process.port, "/v1/completions", body)
        with not_read, long_stream(process) as response:
            parts = response.iter_bytes()
            received = next(parts)
            started = time.monotonic()
            process.popen.send_signal(signal.SIGTERM)
            received += b"".join(parts)
            assert time.monotonic() - started < 5
            assert process.popen.wait(15) == 0
        *chunks, last = parse_events(received)
        assert len(chunks) < 400
        assert "shut" in last["error"]["message"]


def test_a_second_signal_waits_no_longer() -> None:
    with served("--shutdown-timeout", "60") as process:
        wait_until(lambda: process.status() == 200, 60)
        with long_stream(process) as response:
            parts = response.iter_bytes()
            received = next(parts)
            process.popen.send_signal(signal.SIGINT)
            wait_until(lambda: process.status() == 503, 2)
            process.popen.send_signal(signal.SIGINT)
            received += b"".join(parts)
        assert "error" in parse_events(received)[-1]
        assert process.popen.wait(10) == 0


def test_a_third_signal_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the event loop hangs, or a thread that the end waits for."""
    ended: list[int] = []
    monkeypatch.setattr(run_module, "end_process", lambda number, **_: ended.append(number))

    async def handle_three() -> None:
        server = SignalledServer(create_app(ScriptedEngine(tmp_path)), ServerOptions())
        server.has_promises = True
        for number in range(3):
            assert not ended
            server.handle_exit(number, None)

    asyncio.run(handle_three())
    assert ended == [2]


def test_a_server_whose_engine_died_ends_at_once() -> None:
    """O-92: exit code 1, and no wait for what a dead engine will not do."""
    with served("--shutdown-timeout", "600", death="the step raised ValueError") as process:
        wait_until(lambda: process.status() == 503, 60)
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(60) == 1
        assert process.popen.stderr is not None
        assert "error: the step raised ValueError" in process.popen.stderr.read()
