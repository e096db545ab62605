"""Limits the number of prompts that wait for their first token."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import TypeVar

from jpaged.server.errors import OverloadedError

Output = TypeVar("Output")


class RequestQueue:
    """Counts prompts from the time they are read to the first token of their answer."""

    def __init__(self, max_waiting: int) -> None:
        self.num_waiting = 0
        self._max_waiting = max_waiting

    def check_room(self) -> None:
        """Raises `OverloadedError` when the queue is full. A request with many prompts may exceed
        the limit by those: it would never be served otherwise."""
        if self.num_waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self.num_waiting} requests wait already, and at most {self._max_waiting} may "
                "(--max-queued-requests); try again later"
            )

    @contextmanager
    def waiting(self, num_prompts: int) -> Iterator[None]:
        """Count these prompts as waiting, within the context."""
        self.num_waiting += num_prompts
        try:
            yield
        finally:
            self.num_waiting -= num_prompts

    async def until_first(
        self, outputs: AsyncGenerator[tuple[int, Output]], num_prompts: int
    ) -> AsyncGenerator[tuple[int, Output]]:
        """Pass outputs on, and count each prompt as waiting until its first output."""
        waiting = set(range(num_prompts))
        self.num_waiting += num_prompts
        try:
            async with aclosing(outputs):
                async for index, output in outputs:
                    if index in waiting:
                        waiting.remove(index)
                        self.num_waiting -= 1
                    yield index, output
        finally:
            self.num_waiting -= len(waiting)
