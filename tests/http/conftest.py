"""A server in a thread, over real sockets, with the scripted engine behind it."""

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from openai import OpenAI

from jpaged.server.api_keys import ApiKeys
from jpaged.server.app import create_app
from jpaged.server.listening import listen
from jpaged.server.options import ServerOptions
from jpaged.server.uvicorn_config import uvicorn_config
from tests.http.scripted_engine import ScriptedEngine

READY_TIMEOUT_S = 10


@dataclass(frozen=True)
class RunningServer:
    engine: ScriptedEngine
    app: FastAPI
    port: int
    uvicorn: uvicorn.Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=10)

    def post(self, path: str, body: object) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body)


def small_buffered(listener: socket.socket) -> socket.socket:
    """Accepted connections inherit the size: clients that do not read are felt at once."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


@contextmanager
def running_server(
    engine: ScriptedEngine,
    options: ServerOptions = ServerOptions(),  # noqa: B008
    api_keys: ApiKeys = ApiKeys(),  # noqa: B008
) -> Iterator[RunningServer]:
    app = create_app(engine, options, api_keys)
    server = uvicorn.Server(uvicorn_config(app, options))
    [listener] = map(small_buffered, listen("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        yield RunningServer(engine, app, listener.getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(ScriptedEngine(tmp_path_factory.mktemp("tokenizer"))) as server:
        yield server


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    """A healthy server at rest; tests may change its engine, the next one gets it reset."""
    engine = shared_server.engine
    _wait_until_idle(engine)
    engine.is_ready = True
    engine.seconds_per_token = 0.0
    engine.tokens_per_snapshot = 1
    engine.least_logprob = -math.inf
    engine.failure = None
    engine.dead = None
    engine.sampling_defaults = {}
    engine.num_started = 0
    engine.num_generated = 0
    shared_server.app.state.is_draining = False
    return shared_server


@pytest.fixture
def openai_client(server: RunningServer) -> Iterator[OpenAI]:
    base_url = f"{server.url}/v1"
    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=10) as client:
        yield client


def _wait_until_idle(engine: ScriptedEngine) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while engine.running:
        assert time.monotonic() < deadline, f"still running: {list(engine.running)}"
        time.sleep(0.01)
