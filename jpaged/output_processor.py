"""Applies the engine's updates to requests, and tells the engine of stop strings and errors."""

from collections.abc import Iterable
from typing import Protocol

from jpaged.generation import Generation
from jpaged.outputs import FinishReason
from jpaged.scheduling.request_group import RequestGroup
from jpaged.updates import RequestUpdate


class EngineCommands(Protocol):
    """The commands of `Engine` that end requests."""

    def stop(self, group: RequestGroup, index: int) -> None: ...

    def abort(self, group: RequestGroup) -> None: ...

    def fail(self, group: RequestGroup, error: Exception) -> None: ...


class OutputProcessor:
    """Keeps the unfinished requests, and makes text of the tokens that the engine reports.

    Not thread-safe. It reads no state of the engine, so it may run some steps behind, in another
    thread or process.
    """

    def __init__(self, engine: EngineCommands) -> None:
        self._engine = engine
        self._generations: dict[int, Generation] = {}

    def add(self, generation: Generation) -> None:
        """Take a request, whose updates will come."""
        self._generations[generation.number] = generation

    def abort(self, generation: Generation) -> None:
        """End a request unless it has finished. Updates that still come are dropped."""
        if self._generations.pop(generation.number, None) is not None:
            generation.end(FinishReason.ABORT)
            self._engine.abort(generation.group)

    def process(self, updates: Iterable[RequestUpdate]) -> list[Generation]:
        """Apply the updates of a step. Returns the requests that have changed.

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
