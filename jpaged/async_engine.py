"""The engine for asyncio: one thread runs it, coroutines stream from it and may be cancelled."""

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
from jpaged.inputs import Params, Prompt, TokensPrompt, chat_prompt
from jpaged.metrics import Metrics
from jpaged.outputs import RequestOutput
from jpaged.scheduling.request_group import RequestGroup
from jpaged.startup.load_engine import LoadedEngine
from jpaged.startup.loading_thread import load_engine_in_thread
from jpaged.text.tokenizer import Tokenizer

DRAIN_POLL_SECONDS = 0.02
TOKENIZE_THREADS = 4

logger = logging.getLogger(__name__)


class _Stream:
    """Hands snapshots of a request from the engine's thread to a coroutine, when it wants one.

    Snapshots are cumulative, so a slow reader skips some but loses nothing. Meanwhile it costs the
    engine's thread nothing.
    """

    def __init__(
        self, group: RequestGroup, loop: asyncio.AbstractEventLoop, *, skip_middle: bool
    ) -> None:
        self._group = group
        self._loop = loop
        self._skip_middle = skip_middle
        self._changed = asyncio.Event()
        self._latest: RequestOutput | JpagedError | None = None
        # Read and written by the engine's thread only.
        self._is_wanted = False
        self._has_news = False

    def want(self) -> None:
        """Deliver a snapshot as soon as there is news. Called by the engine's thread."""
        self._is_wanted = True
        self._deliver()

    def progress(self) -> None:
        """Note that the request has news. Called by the engine's thread."""
        self._has_news = True
        self._deliver()

    def _deliver(self) -> None:
        is_due = self._latest is None or self._group.is_finished or not self._skip_middle
        if self._is_wanted and self._has_news and is_due:
            self._is_wanted = self._has_news = False
            self.put(self._group.output())

    def put(self, item: RequestOutput | JpagedError) -> None:
        """Called by the engine's thread."""
        self._latest = item
        # The loop is closed when a program ends in the middle of a stream.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    async def get(self) -> RequestOutput:
        await self._changed.wait()
        self._changed.clear()
        assert self._latest is not None
        if isinstance(self._latest, JpagedError):
            raise self._latest
        return self._latest


class AsyncEngine:
    """Construct, `await start()`, then call `generate` from any number of coroutines."""

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
        self._streams: dict[RequestGroup, _Stream] = {}
        # Actions of coroutines, carried out by the engine's thread between two steps.
        self._actions: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
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
        """Only for reading: the engine's thread may change it at any time."""
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
        """A conversation in the model's chat template."""
        return chat_prompt(
            self.tokenizer,
            messages,
            max_model_len=self.max_model_len,
            add_generation_prompt=add_generation_prompt,
        )

    async def generate(
        self, prompt: Prompt, params: Params, *, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Snapshots of the growing answer; the last one has `finished`.

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
    ) -> RequestGroup:
        """Tokenize and check a request, which `run` then answers.

        arrival_time: when the client asked, on the clock of `time.monotonic()`; now by default.
        Raises `RequestError` for a request that is refused.
        """
        self.check_health()
        if self._is_draining:
            raise EngineDeadError("the server is shutting down and takes no new requests")
        if request_id is None:
            request_id = f"request-{next(self._request_numbers)}"
        make_request = partial(
            self.engine.make_request,
            request_id,
            prompt,
            params,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
        )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizing, make_request)

    async def run(
        self, group: RequestGroup, *, skip_middle: bool = False
    ) -> AsyncGenerator[RequestOutput]:
        """Snapshots of the growing answer to a prepared request; the last one has `finished`.

        skip_middle: the first and the last one only. Otherwise as `generate`.
        """
        # Known to the engine's thread before its health is checked: if it stops after the check,
        # it ends the stream.
        loop = asyncio.get_running_loop()
        stream = self._streams[group] = _Stream(group, loop, skip_middle=skip_middle)
        is_finished = False
        try:
            self.check_health()
            self._actions.put(lambda engine: engine.add_request(group))
            while not is_finished:
                self._actions.put(lambda engine: stream.want())
                output = await stream.get()
                is_finished = output.finished
                yield output
        finally:
            self._streams.pop(group, None)
            if not is_finished:
                self._actions.put(lambda engine: engine.abort(group))

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, and wait up to `timeout` seconds for the running ones. An engine
        that has stopped has none."""
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

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._take_actions():
                if self.engine.has_unfinished:
                    for group in self.engine.step():
                        self._deliver(group)
            self._stop(EngineDeadError("it was shut down"))
        except BaseException as error:
            logger.exception("the engine has stopped")
            self._stop(error)

    def _take_actions(self) -> bool:
        """Carry out what is queued, waiting when there is nothing else to do. False: stop."""
        is_idle = not self.engine.has_unfinished
        while is_idle or not self._actions.empty():
            action = self._actions.get()
            if action is None:
                return False
            action(self.engine)
            is_idle = False
        return True

    def _deliver(self, group: RequestGroup) -> None:
        # The reader may have gone while the step was on its way.
        stream = self._streams.get(group)
        if stream is None:
            return
        try:
            stream.progress()
        except Exception as error:
            self.engine.fail(group, error)
            stream.put(JpagedError("this request ended by an error; the log says more"))

    def _stop(self, error: BaseException) -> None:
        """From now on everybody who reads, or comes to read, gets the error."""
        self._death = error
        self.engine.metrics.record_stopped()
        for stream in list(self._streams.values()):
            stream.put(EngineDeadError(f"the engine has stopped: {error}"))
