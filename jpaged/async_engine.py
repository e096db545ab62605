"""The asyncio front door: one thread runs the engine, and coroutines stream answers from it.

The engine's thread hands over token ids after each step. The event loop's thread makes outputs with
text of them, while the engine computes the next step.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.errors import EngineDeadError, JpagedError
from jpaged.generation import Generation
from jpaged.inputs import Params, Prompt, TokensPrompt, chat_prompt
from jpaged.metrics import Metrics
from jpaged.output_processor import OutputProcessor
from jpaged.outputs import RequestOutput
from jpaged.scheduling.request_group import RequestGroup
from jpaged.startup.load_engine import LoadedEngine
from jpaged.startup.loading_thread import load_engine_in_thread
from jpaged.text.tokenizer import Tokenizer
from jpaged.updates import RequestUpdate

DRAIN_POLL_SECONDS = 0.02
# Steps whose updates may wait for the event loop. Bounds the tokens that are computed behind a stop
# string, and the memory of updates when the loop is slow.
MAX_STEPS_AHEAD = 8
BLOCKED_POLL_SECONDS = 0.5  # between two looks whether the loop was closed
TOKENIZE_THREADS = 4

logger = logging.getLogger(__name__)


class _Stream:
    """Wakes the coroutine that reads one request's outputs. Used in the event loop's thread only.

    Outputs are cumulative, and made when they are read: a slow reader gets fewer of them, without
    a loss.
    """

    def __init__(self, generation: Generation, *, skip_middle: bool) -> None:
        self._generation = generation
        self._skip_middle = skip_middle
        self._is_read = False
        self._changed = asyncio.Event()
        self._error: JpagedError | None = None

    def progress(self) -> None:
        """Wake the reader, as the request has changed."""
        is_middle = self._is_read and not self._generation.is_finished
        if not (self._skip_middle and is_middle):
            self._changed.set()

    def fail(self, error: JpagedError) -> None:
        """Raise the error in the coroutine that reads."""
        self._error = error
        self._changed.set()

    async def get(self) -> RequestOutput:
        """Wait until the request has changed, and return its output as it is then."""
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        self._is_read = True
        try:
            return self._generation.output()
        except Exception as error:
            logger.exception("request %s has no output", self._generation.request_id)
            raise JpagedError("this request ended by an error; the log says more") from error


class _Commands:
    """Queues commands of the output processor for the engine's thread."""

    def __init__(self, actions: "queue.SimpleQueue[Callable[[Engine], None] | None]") -> None:
        self._actions = actions

    def stop(self, group: RequestGroup, index: int) -> None:
        self._actions.put(lambda engine: engine.stop(group, index))

    def abort(self, group: RequestGroup) -> None:
        self._actions.put(lambda engine: engine.abort(group))

    def fail(self, group: RequestGroup, error: Exception) -> None:
        self._actions.put(lambda engine: engine.fail(group, error))


class AsyncEngine:
    """Runs an engine in a thread of its own.

    `await start()` once, then call `generate` from any number of coroutines.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.model_name = config.served_model_name or config.model
        self.tokenizer: Tokenizer | None = None
        self.max_model_len = 0
        # Arguments of `SamplingParams` for requests that do not give them.
        self.sampling_defaults: dict[str, Any] = {}
        self._loaded: LoadedEngine | None = None
        self._death: BaseException | None = None
        self._is_draining = False
        self._request_numbers = count()
        # Actions of coroutines, carried out by the engine's thread between two steps.
        self._actions: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._streams: dict[Generation, _Stream] = {}
        self._outputs = OutputProcessor(_Commands(self._actions))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._steps_ahead = threading.BoundedSemaphore(MAX_STEPS_AHEAD)
        # Off the event loop, and in several threads: a long prompt must not hold up short ones.
        self._tokenizing = ThreadPoolExecutor(TOKENIZE_THREADS, thread_name_prefix="tokenize")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> None:
        """Load the model, compile its programs, start the engine. Raises `JpagedError`."""
        loaded = await load_engine_in_thread(self.config)
        self.model_name = loaded.model_name
        self.tokenizer = loaded.tokenizer
        self.max_model_len = loaded.max_model_len
        self.sampling_defaults = loaded.sampling_defaults
        self._loaded = loaded
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self._loaded is not None

    @property
    def engine(self) -> Engine:
        """The engine, for reading only: its thread may change it at any time."""
        if self._loaded is None:
            raise EngineDeadError("the engine has not started yet")
        return self._loaded.engine

    @property
    def metrics(self) -> Metrics:
        return self.engine.metrics

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine's loop has stopped."""
        if self._death is not None:
            raise EngineDeadError(f"the engine has stopped: {self._death}") from self._death

    def chat_prompt(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> TokensPrompt:
        """Return the prompt of a conversation, made by the model's chat template."""
        return chat_prompt(
            self.tokenizer,
            messages,
            max_model_len=self.max_model_len,
            add_generation_prompt=add_generation_prompt,
        )

    async def generate(
        self, prompt: Prompt, params: Params, *, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Yield snapshots of the growing answer; the last one has `finished`.

        Closing or cancelling the iterator aborts the request. Raises `RequestError` for a request
        that is refused and `EngineDeadError` when the engine stops. `request_id` only labels the
        output: two requests may have the same.
        """
        request = await self.prepare(prompt, params, request_id=request_id)
        async with contextlib.aclosing(self.run(request)) as outputs:
            async for output in outputs:
                yield output

    async def prepare(
        self,
        prompt: Prompt,
        params: Params,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
    ) -> Generation:
        """Tokenize and check a request for `run`.

        arrival_time: when the client asked, on the clock of `time.monotonic()`; now by default.
        Raises `RequestError` for a request that is refused.
        """
        self.check_health()
        if self._is_draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")
        if request_id is None:
            request_id = f"request-{next(self._request_numbers)}"
        if arrival_time is None:
            arrival_time = time.monotonic()
        make_request = partial(self._make_request, request_id, prompt, params, arrival_time)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, make_request)

    async def run(
        self, generation: Generation, *, skip_middle: bool = False
    ) -> AsyncGenerator[RequestOutput]:
        """Yield snapshots of the growing answer to a prepared request, as `generate` does.

        skip_middle: yield the first and the last one only.
        """
        self._bind(asyncio.get_running_loop())
        # Known to the loop before the engine's health is checked: if it stops after the check, the
        # stream is ended.
        stream = self._streams[generation] = _Stream(generation, skip_middle=skip_middle)
        try:
            self.check_health()
            self._outputs.add(generation)
            self._actions.put(lambda engine: engine.add_request(generation.group))
            is_finished = False
            while not is_finished:
                output = await stream.get()
                is_finished = output.finished
                yield output
        finally:
            self._streams.pop(generation, None)
            self._outputs.abort(generation)

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, and wait up to `timeout` seconds for the running ones.

        Returns at once if the engine has stopped.
        """
        self._is_draining = True
        deadline = time.monotonic() + timeout
        while self._death is None and self._is_busy() and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def shutdown(self) -> None:
        """Stop the engine's thread; requests that still run end with `EngineDeadError`."""
        self._is_draining = True
        self._actions.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def _is_busy(self) -> bool:
        return bool(self._streams) or not self._actions.empty()

    def _make_request(
        self, request_id: str, prompt: Prompt, params: Params, arrival_time: float
    ) -> Generation:
        assert self._loaded is not None
        generation = self._loaded.inputs.request(
            request_id, prompt, params, arrival_time=arrival_time
        )
        self.engine.check_fits(generation.group)
        return generation

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make this the loop that gets the updates.

        A loop before it may have been closed with updates that it never took, so steps are counted
        anew.
        """
        if self._loop is not loop:
            self._loop = loop
            self._steps_ahead = threading.BoundedSemaphore(MAX_STEPS_AHEAD)

    def _process(self, updates: list[RequestUpdate], steps_ahead: threading.Semaphore) -> None:
        """Apply updates that the engine's thread has handed over."""
        steps_ahead.release()
        for generation in self._outputs.process(updates):
            # The reader may have gone while the step was on its way.
            if (stream := self._streams.get(generation)) is not None:
                stream.progress()

    def _fail_streams(self, error: EngineDeadError) -> None:
        for stream in self._streams.values():
            stream.fail(error)

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._take_actions():
                if self.engine.has_unfinished and (updates := self.engine.step()):
                    self._hand_over(updates)
            self._stop(EngineDeadError("it was shut down"))
        except BaseException as error:
            logger.exception("the engine has stopped")
            self._stop(error)

    def _take_actions(self) -> bool:
        """Carry out queued actions, and wait for one while there is nothing to compute.

        Returns False if the thread is to stop.
        """
        is_idle = not self.engine.has_unfinished
        while is_idle or not self._actions.empty():
            action = self._actions.get()
            if action is None:
                return False
            action(self.engine)
            is_idle = False
        return True

    def _hand_over(self, updates: list[RequestUpdate]) -> None:
        """Give the updates to the event loop, after waiting while it is too many steps behind."""
        loop, steps_ahead = self._loop, self._steps_ahead
        assert loop is not None
        # A loop that is closed, as a program ends in the middle of a stream, takes nothing more.
        while not steps_ahead.acquire(timeout=BLOCKED_POLL_SECONDS):
            if loop.is_closed():
                return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._process, updates, steps_ahead)

    def _stop(self, error: BaseException) -> None:
        """Note why the engine has stopped. All present and future readers get the error."""
        self._death = error
        self.engine.metrics.record_stopped()
        if self._loop is not None:
            death = EngineDeadError(f"the engine has stopped: {error}")
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail_streams, death)
