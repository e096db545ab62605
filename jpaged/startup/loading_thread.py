"""Loads an engine beside a running event loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from jpaged.config import EngineConfig
from jpaged.progress import Progress
from jpaged.startup.load_engine import LoadedEngine, load_engine


async def load_engine_in_thread(config: EngineConfig) -> LoadedEngine:
    """`load_engine` in a thread of its own, which nobody waits for once this is cancelled.

    The thread then ends at its next sign of progress: XLA finishes the program it compiles.
    """
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[LoadedEngine] = loop.create_future()
    progress = Progress()

    def deliver(settle: Callable[[Any], None], outcome: Any) -> None:
        # The loop may be closed, and the future cancelled, when the outcome comes.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: loaded.done() or settle(outcome))

    def load() -> None:
        try:
            engine = load_engine(config, progress=progress)
        except BaseException as error:
            deliver(loaded.set_exception, error)
        else:
            deliver(loaded.set_result, engine)

    threading.Thread(target=load, name="load", daemon=True).start()
    try:
        return await loaded
    finally:
        progress.cancel()
