"""An engine without a model: tokens are scripted; tokenizer, checks, text and metrics are real."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

from jpaged.async_engine import AsyncEngine
from jpaged.errors import EngineDeadError
from jpaged.generation import Generation
from jpaged.inputs import InputProcessor, Prompt, chat_prompt
from jpaged.metrics import Metrics
from jpaged.outputs import FinishReason, RequestOutput, TokenLogprobs
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.request import Request
from jpaged.text.tokenizer import Tokenizer
from tests.doubles import EOS, byte_tokenizer, save_tokenizer

MODEL_NAME = "scripted"
MAX_MODEL_LEN = 512


class ScriptedEngine(AsyncEngine):
    """The interface of `AsyncEngine`. The answer to a prompt is "[prompt]" and end of sequence;
    when that is ignored, it starts again. Of several answers, number i > 0 starts i tokens late
    and is "[prompt]i".

    seconds_per_token: pause before each token.
    tokens_per_snapshot: steps from one snapshot to the next, as a slow reader sees them.
    least_logprob: log-probabilities below are minus infinity.
    failure: raised instead of the next token of every request.
    last_params: parameters of the newest request.
    """

    # Properties of the base class, which tests set here.
    is_ready: bool = True  # pyright: ignore
    metrics: Metrics = None  # pyright: ignore

    def __init__(self, folder: Path) -> None:
        save_tokenizer(byte_tokenizer(), folder)
        self.tokenizer: Tokenizer | None = Tokenizer.from_folder(folder)
        self.model_name = MODEL_NAME
        self.max_model_len = MAX_MODEL_LEN
        self.sampling_defaults: dict[str, Any] = {}
        self.metrics = Metrics(model_name=MODEL_NAME, max_model_len=MAX_MODEL_LEN)
        self.seconds_per_token = 0.0
        self.tokens_per_snapshot = 1
        self.least_logprob = -math.inf
        self.failure: Exception | None = None
        self.dead: EngineDeadError | None = None
        self.running: dict[str, Generation] = {}
        self.num_started = 0
        self.num_generated = 0
        self.last_params: SamplingParams | None = None
        self._inputs = InputProcessor(
            self.tokenizer,
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[self.tokenizer.encode(EOS)[0]],
        )

    def check_health(self) -> None:
        if self.dead is not None:
            raise self.dead

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
    ) -> Generation:
        self.last_params = params
        request_id = request_id or f"request-{self.num_started}"
        return self._inputs.request(request_id, prompt, params, arrival_time=arrival_time)

    def chat_prompt(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> Prompt:
        return chat_prompt(
            self.tokenizer,
            list(messages),
            max_model_len=self.max_model_len,
            add_generation_prompt=add_generation_prompt,
        )

    async def start(self) -> None:
        self.is_ready = True

    async def drain(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def shutdown(self) -> None:
        if self.running:
            self.failure = EngineDeadError("the engine was shut down")

    async def run(
        self, generation: Generation, *, skip_middle: bool = False
    ) -> AsyncGenerator[RequestOutput]:
        request_id = generation.request_id
        assert request_id not in self.running
        self.running[request_id] = generation
        self.num_started += 1
        requests = generation.group.requests
        for request in requests:
            request.first_scheduled_time = time.monotonic()
        try:
            self._score(requests[0])
            if generation.params.max_tokens == 0:
                requests[0].finish(FinishReason.LENGTH)
                self._take_update(generation)
                yield generation.output()
                return
            scripts = [cycle(self._script(request)) for request in requests]
            for step in count(1):
                await asyncio.sleep(self.seconds_per_token)
                if self.failure is not None:
                    raise self.failure
                for request, script in zip(requests, scripts, strict=True):
                    if not request.is_finished and request.index < step:
                        self._append(request, next(script))
                self._take_update(generation)
                is_due = step == 1 if skip_middle else step % self.tokens_per_snapshot == 0
                if generation.is_finished or is_due:
                    yield generation.output()
                if generation.is_finished:
                    return
        finally:
            for request in requests:
                if not request.is_finished:
                    request.finish(FinishReason.ABORT)
            self.metrics.record_finished(generation.group)
            del self.running[request_id]

    def _take_update(self, generation: Generation) -> None:
        for index in generation.take(generation.group.take_update()):
            generation.group.requests[index].finish(FinishReason.STOP)

    def _script(self, request: Request) -> list[int]:
        tokenizer = self._inputs.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.decode(request.token_ids, skip_special_tokens=True)
        number = str(request.index) if request.index > 0 else ""
        return tokenizer.encode(f"[{prompt}]{number}{EOS}")

    def _score(self, request: Request) -> None:
        """As if the prompt were an answer of the script."""
        number = request.num_prompt_logprobs
        if number is not None:
            followers = enumerate(request.token_ids[1:], start=1)
            request.append_scores(
                1, [self._logprobs(request, each, number, position) for position, each in followers]
            )

    def _append(self, request: Request, token_id: int) -> None:
        last, logprobs = request.last_token_time, None
        if request.params.num_reported_logprobs is not None:
            number = request.params.num_reported_logprobs
            logprobs = self._logprobs(request, token_id, number, request.num_output_tokens)
        request.append_token(token_id, logprobs)
        self.num_generated += 1
        if last is None:
            self.metrics.record_first_token(request)
            self.metrics.record_prompt(request)
        assert request.last_token_time is not None
        since_last = None if last is None else request.last_token_time - last
        self.metrics.record_tokens(request, 1, since_last)

    def _logprobs(
        self, request: Request, token_id: int, number: int, position: int
    ) -> TokenLogprobs:
        """The scripted token is the likeliest, then second, third, fourth and likeliest again;
        around it are the tokens that follow it in the vocabulary. Later answers are likelier."""
        own_rank = position % 4
        ids = [(token_id + 1 + rank) % self._inputs.vocab_size for rank in range(number)]
        ids[own_rank : own_rank + 1] = [token_id] * (own_rank < number)

        def logprob(rank: int) -> float:
            value = -(rank + 1) / (2 + request.index)
            return value if value >= self.least_logprob else -math.inf

        top = tuple((each, logprob(rank)) for rank, each in enumerate(ids))
        return TokenLogprobs(logprob=logprob(own_rank), top=top)
