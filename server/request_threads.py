"""Runs work on requests in threads, where it does not block the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

# From this size on, in bytes or characters, work is large: it takes milliseconds.
LARGE = 64 * 1024
NUM_SMALL_THREADS = 4

Result = TypeVar("Result")


class RequestThreads:
    """A thread for large pieces of work, and some for small ones.

    Large pieces run one at a time, which limits their memory and their share of the processor.
    Small ones never wait for them.
    """

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(NUM_SMALL_THREADS, thread_name_prefix="small-request")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-request")

    async def run(self, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """Return `work(*arguments)`. size: bytes or characters of its input."""
        pool = self._large if size >= LARGE else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
