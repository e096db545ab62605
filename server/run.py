"""Runs a server: listens, starts the engine, serves, drains and stops."""

import asyncio
import contextlib
import json
import shlex
import socket
from collections.abc import Coroutine
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from jpaged.async_engine import AsyncEngine
from jpaged.config import EngineConfig
from jpaged.server.api_keys import ApiKeys, read_api_keys
from jpaged.server.app import create_app
from jpaged.server.listening import base_url, listen
from jpaged.server.options import ServerOptions
from jpaged.server.uvicorn_config import uvicorn_config
from jpaged.startup.interruption import end_process


def serve(config: EngineConfig, options: ServerOptions) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Raises `JpagedError` if the server cannot start, and `EngineDeadError` at the end if the engine
    had stopped by itself.
    """
    api_keys = read_api_keys(options.api_key, options.api_key_file)
    listeners = listen(options.host, options.port)
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        asyncio.run(_serve(config, options, api_keys, listeners))


async def _serve(
    config: EngineConfig,
    options: ServerOptions,
    api_keys: ApiKeys,
    listeners: list[socket.socket],
) -> None:
    engine = AsyncEngine(config)
    app = create_app(engine, options, api_keys)
    server = SignalledServer(app, options)
    serving = asyncio.create_task(server.serve(sockets=listeners))
    # Without a server nobody can be answered: end instead of waiting for a signal.
    serving.add_done_callback(lambda _: server.stop_requested.set())
    try:
        if await _finishes(engine.start(), before=server.stop_requested):
            server.has_promises = True
            scheme = "http" if options.ssl_certfile is None else "https"
            url = base_url(listeners, options.host, scheme=scheme)
            print(greeting(engine, url, needs_key=bool(api_keys)), flush=True)
            await server.stop_requested.wait()
            app.state.is_draining = True
            await _finishes(engine.drain(options.shutdown_timeout), before=server.stop_urged)
            engine.check_health()  # the exit code tells that the engine had died
    finally:
        await engine.shutdown()
        server.should_exit = True
        await serving


async def _finishes(work: Coroutine[Any, Any, None], *, before: asyncio.Event) -> bool:
    """Run `work` until it is done or the event is set. Returns whether it is done."""
    worker = asyncio.create_task(work)
    waiter = asyncio.create_task(before.wait())
    await asyncio.wait({worker, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if worker.done():
        worker.result()
        return True
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)
    return False


def greeting(engine: AsyncEngine, url: str, *, needs_key: bool = False) -> str:
    """Return the text for a server that is ready: model, URL and a command to try it with."""
    body: dict[str, Any] = {"model": engine.model_name}
    if engine.tokenizer is None:
        path, body["prompt"] = "completions", [1, 2, 3]
    elif engine.tokenizer.has_chat_template:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
    else:
        path, body["prompt"] = "completions", "Once upon a time"
    key = "-H 'Authorization: Bearer KEY' " if needs_key else ""
    return (
        f"\njpaged serves {engine.model_name} at {url}/v1 (Ctrl-C stops it). Try:\n\n"
        f"curl {url}/v1/{path} -H 'Content-Type: application/json' {key}"
        f"-d {shlex.quote(json.dumps(body))}\n"
    )


class SignalledServer(uvicorn.Server):
    """uvicorn's server with other reactions to SIGINT and SIGTERM.

    The first signal asks for the end instead of closing the port at once: requests that come while
    the running ones finish get an answer, 503. The second one asks not to wait for those. A third
    one ends the process, as a device that hangs would keep it for ever.

    has_promises: whether the engine is ready, so that clients may wait for answers. Before, each
    signal ends the process, since compiling cannot be interrupted.
    """

    def __init__(self, app: FastAPI, options: ServerOptions) -> None:
        super().__init__(uvicorn_config(app, options))
        self.has_promises = False
        self.stop_requested = asyncio.Event()
        self.stop_urged = asyncio.Event()
        self._num_signals = 0
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if not self.has_promises or self._num_signals > 2:
            end_process(sig, sigterm_code=0)
        # The signal may interrupt anything, the loop's own code included.
        self._loop.call_soon_threadsafe(self._note_signal)

    def _note_signal(self) -> None:
        if self.stop_requested.is_set():
            self.stop_urged.set()
        self.stop_requested.set()
