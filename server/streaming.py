"""Turns the engine's async iterators into server-sent events, and aborts them when a client leaves.

Nothing here uses anyio's cancel scopes: they cancel a clean-up again at each of its awaits,
and the clean-up here is what aborts the engine's requests.
"""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from jpaged.async_engine import AsyncEngine
from jpaged.errors import JpagedError
from jpaged.generation import Generation
from jpaged.outputs import FinishReason, RequestOutput
from jpaged.server.answers import AnswerFormat, usage_of
from jpaged.server.deltas import Delta, deltas
from jpaged.server.errors import GenerationError, UnavailableError, error_body
from jpaged.server.json_response import json_bytes
from jpaged.server.protocol import ChatCompletionChunk, Completion, ErrorBody

logger = logging.getLogger(__name__)

# NEL, LINE SEPARATOR and PARAGRAPH SEPARATOR in UTF-8. They end no line of an event stream, but
# clients that split lines as Unicode does would cut the JSON. It escapes control characters anyway.
_LINE_ENDS = re.compile("\u0085|\u2028|\u2029".encode())

DONE_EVENT = b"data: [DONE]\n\n"

Result = TypeVar("Result")
IndexedOutput = tuple[int, RequestOutput]


async def generate(
    engine: AsyncEngine, requests: Sequence[Generation], *, skip_middle: bool
) -> AsyncGenerator[IndexedOutput]:
    """Yield snapshots of all requests as they come, each with the index of its request.

    Closing it aborts the unfinished requests. Raises `JpagedError` if a request is cut short.
    """
    iterators = [engine.run(request, skip_middle=skip_middle) for request in requests]
    async with aclosing(merge(iterators)) as merged:
        async for index, output in merged:
            _check_finish(output)
            yield index, output


async def collect(outputs: AsyncGenerator[IndexedOutput]) -> list[RequestOutput]:
    """Return the last snapshot of each prompt, in the order of the prompts."""
    latest: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for index, output in outputs:
            latest[index] = output
    return [latest[index] for index in sorted(latest)]


async def events(
    outputs: AsyncGenerator[IndexedOutput], answer_format: AnswerFormat
) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of a response.

    An error becomes the last event, since the status was sent before.
    """
    latest: dict[int, RequestOutput] = {}
    try:
        async with aclosing(outputs):
            async for index, output in outputs:
                for answer_index, delta in deltas(latest.get(index), output):
                    choice = answer_format.choice_index(index, answer_index)
                    for chunk in await _chunks(answer_format, choice, delta):
                        yield chunk
                latest[index] = output
    except Exception as error:
        if not isinstance(error, JpagedError):
            logger.exception("a stream failed")
        yield _event(error_body(error))
        return
    if answer_format.includes_usage:
        yield _event(answer_format.usage_chunk(usage_of(list(latest.values()))))
    yield DONE_EVENT


class EventStream(StreamingResponse):
    """Sends events until they end or the client disconnects, and closes them in either case."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        # Proxies that buffer would hand over the whole stream at its end.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except (ClientDisconnect, OSError):
            return

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events):
            await self.stream_response(send)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, or cancel it and raise `ClientDisconnect`.

    The body of the request must have been read before: a rest of it is dropped.
    """
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        await _cancel(worker, watcher)


async def merge(
    iterators: Sequence[AsyncGenerator[RequestOutput]],
) -> AsyncGenerator[IndexedOutput]:
    """Yield the items of all iterators as they come, each with the index of its iterator.

    Raises the first error of an iterator. Closes all of them at its end.
    """
    if len(iterators) == 1:  # saves a task and a queue for most requests
        async with aclosing(iterators[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    # Room for one item: a slow reader holds back its producers and no snapshots pile up.
    queue: asyncio.Queue[IndexedOutput | Exception | None] = asyncio.Queue(maxsize=1)
    tasks = [
        asyncio.create_task(_forward(index, iterator, queue))
        for index, iterator in enumerate(iterators)
    ]
    try:
        num_open = len(tasks)
        while num_open > 0:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await _cancel(*tasks)


async def _chunks(answer_format: AnswerFormat, index: int, delta: Delta) -> list[bytes]:
    def events_of_delta() -> list[bytes]:
        return [_event(chunk) for chunk in answer_format.chunks(index, delta)]

    if delta.prompt is None or not answer_format.shows_prompt:
        return events_of_delta()
    # In a thread, as log-probabilities of long prompts are megabytes.
    return await asyncio.to_thread(events_of_delta)


async def _forward(
    index: int,
    iterator: AsyncGenerator[RequestOutput],
    queue: asyncio.Queue[IndexedOutput | Exception | None],
) -> None:
    """Put the items of an iterator into a queue, then None or the error that ended it."""
    try:
        async with aclosing(iterator):
            async for output in iterator:
                await queue.put((index, output))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _check_finish(output: RequestOutput) -> None:
    """Raise for an answer that was cut short, so that it does not look like a whole one."""
    reasons = {answer.finish_reason for answer in output.outputs}
    if FinishReason.ERROR in reasons:
        raise GenerationError("the engine could not finish this answer")
    if FinishReason.ABORT in reasons:
        raise UnavailableError("the answer was aborted, as the server shuts down")


def _event(value: Completion | ChatCompletionChunk | ErrorBody) -> bytes:
    return b"data: " + _LINE_ENDS.sub(_escaped, json_bytes(value)) + b"\n\n"


def _escaped(match: re.Match[bytes]) -> bytes:
    return f"\\u{ord(match.group().decode()):04x}".encode()
