"""Threads for work on requests that would hold up the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

# From this size on, in bytes or characters, work is large: it takes milliseconds.
LARGE = 64 * 1024
NUM_SMALL_THREADS = 4

Result = TypeVar("Result")


class RequestThreads:
    """Large pieces of work wait for each other, so that they take the memory and the processor of
    one at a time; small ones do not wait for large ones."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(NUM_SMALL_THREADS, thread_name_prefix="small-request")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-request")

    async def run(self, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """The result of `work(*arguments)`, whose input has `size` bytes or characters."""
        pool = self._large if size >= LARGE else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)
