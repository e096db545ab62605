"""From the updates of the engine to the outputs that clients read: text, and stop strings in it."""

from collections.abc import Iterable
from typing import Protocol

from jpaged.generation import Generation
from jpaged.outputs import FinishReason
from jpaged.scheduling.request_group import RequestGroup
from jpaged.updates import RequestUpdate


class EngineCommands(Protocol):
    """What the engine must hear of its requests; see `Engine`."""

    def stop(self, group: RequestGroup, index: int) -> None: ...

    def abort(self, group: RequestGroup) -> None: ...

    def fail(self, group: RequestGroup, error: Exception) -> None: ...


class OutputProcessor:
    """Not thread-safe. It reads none of the engine's state, so that it may run in another thread
    or process than the engine, some steps behind."""

    def __init__(self, engine: EngineCommands) -> None:
        self._engine = engine
        self._generations: dict[int, Generation] = {}

    def add(self, generation: Generation) -> None:
        """Expect updates of a request."""
        self._generations[generation.number] = generation

    def abort(self, generation: Generation) -> None:
        """End a request, if it has not finished; updates that still come are dropped."""
        if self._generations.pop(generation.number, None) is not None:
            generation.end(FinishReason.ABORT)
            self._engine.abort(generation.group)

    def process(self, updates: Iterable[RequestUpdate]) -> list[Generation]:
        """Take in what is new after a step. Returns the requests that have something new.

        An error in the text of one request ends that request alone.
        """
        progressed = []
        for update in updates:
            generation = self._generations.get(update.number)
            if generation is None:
                continue  # it has ended, and the engine was ahead
            try:
                self._take(generation, update)
            except Exception as error:
                self._generations.pop(generation.number, None)
                generation.end(FinishReason.ERROR)
                self._engine.fail(generation.group, error)
            progressed.append(generation)
        return progressed

    def _take(self, generation: Generation, update: RequestUpdate) -> None:
        stopped = generation.take(update)
        if generation.is_finished:
            del self._generations[generation.number]
        for index in stopped:
            self._engine.stop(generation.group, index)
