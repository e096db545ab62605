"""The engine: requests go in, tokens come out, one step at a time.

Not thread-safe: one thread calls everything. The front doors are `LLM` and `AsyncEngine`.
"""

import time
from dataclasses import dataclass

from jpaged.block_pool import BlockPool
from jpaged.inputs import InputProcessor, Prompt
from jpaged.metrics import Metrics
from jpaged.outputs import FinishReason, TokenLogprobs
from jpaged.request import Request
from jpaged.request_group import RequestGroup
from jpaged.runner import LaunchedStep, Runner
from jpaged.sampling_params import SamplingParams
from jpaged.scheduled_batch import ScheduledBatch
from jpaged.scheduler import Scheduler


@dataclass
class StepTimings:
    """Seconds that the host spent, added up over `num_steps` steps.

    scheduling: choosing requests and blocks. launching: packing inputs and handing them over.
    waiting: reading the tokens of the step before, the device's time included. processing:
    taking in those tokens, text included.
    """

    num_steps: int = 0
    scheduling: float = 0.0
    launching: float = 0.0
    waiting: float = 0.0
    processing: float = 0.0


class Engine:
    def __init__(
        self,
        runner: Runner,
        inputs: InputProcessor,
        metrics: Metrics,
        *,
        enable_prefix_caching: bool = True,
        check_invariants: bool = False,
    ) -> None:
        spec = runner.spec
        self.inputs = inputs
        self.metrics = metrics
        self.block_pool = BlockPool(spec.kv_cache.num_blocks)
        self.scheduler = Scheduler(
            self.block_pool,
            block_size=spec.kv_cache.block_size,
            max_num_seqs=spec.num_slots,
            max_num_batched_tokens=spec.max_num_tokens,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.step_timings = StepTimings()
        self._runner = runner
        self._check_invariants = check_invariants
        self._groups: dict[Request, RequestGroup] = {}
        self._launched: LaunchedStep | None = None

    def make_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> RequestGroup:
        """Tokenize and check a request without queueing it. Thread-safe.

        Raises `RequestError` that names the field at fault.
        """
        group = self.inputs.request(request_id, prompt, params)
        self.scheduler.check_fits(group.num_prompt_tokens)
        return group

    def add_request(self, group: RequestGroup) -> None:
        """Queue a request made by `make_request`."""
        for request in group.requests:
            self.scheduler.add(request)
            self._groups[request] = group

    def abort(self, group: RequestGroup) -> None:
        """End a request and free its blocks; nothing happens if it has finished already."""
        for request in group.requests:
            if not request.is_finished:
                self.scheduler.finish(request, FinishReason.ABORT)
                self._forget(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do."""
        return self.scheduler.has_requests or self._launched is not None

    def step(self) -> list[RequestGroup]:
        """Schedule and launch a step, then take in the tokens of the step before.

        Returns the requests that have new tokens or are finished.
        """
        timings = self.step_timings
        started = time.perf_counter()
        batch = self.scheduler.schedule()
        scheduled = time.perf_counter()
        timings.scheduling += scheduled - started
        finished_step = self._launched
        self._launched = self._runner.launch(batch) if batch.num_tokens else None
        launched = time.perf_counter()
        timings.launching += launched - scheduled
        progressed = batch.finished + self._process(finished_step)
        # A dict keeps the order and drops doubles.
        groups = list(dict.fromkeys(self._groups[request] for request in progressed))
        for request in progressed:
            if request.is_finished:
                self._forget(request)
        self._record(batch)
        if self._check_invariants:
            self.scheduler.check_integrity()
        return groups

    def _process(self, step: LaunchedStep | None) -> list[Request]:
        if step is None:
            return []
        timings = self.step_timings
        started = time.perf_counter()
        tokens, logprobs = step.read_tokens(), step.read_logprobs()
        read = time.perf_counter()
        progressed = []
        for request, token, token_logprobs in zip(step.requests, tokens, logprobs, strict=True):
            # A step ahead, one token more may have been sampled than the answer has.
            if not request.is_finished:
                self._append(request, token, token_logprobs)
                progressed.append(request)
        timings.num_steps += 1
        timings.waiting += read - started
        timings.processing += time.perf_counter() - read
        return progressed

    def _append(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        last_token_time = request.last_token_time
        request.append_token(token, logprobs)
        assert request.last_token_time is not None
        if last_token_time is None:
            self.metrics.record_first_token(request)
            self.metrics.record_prefix_cache(
                num_queried=request.num_prompt_tokens, num_hit=request.num_cached_tokens
            )
            self.metrics.record_tokens(request, 1, None)
        else:
            self.metrics.record_tokens(request, 1, request.last_token_time - last_token_time)
        if request.is_finished:
            self.scheduler.retire(request)

    def _forget(self, request: Request) -> None:
        del self._groups[request]
        self.metrics.record_finished(request)

    def _record(self, batch: ScheduledBatch) -> None:
        self.metrics.record_step(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_cache_usage=self.block_pool.usage,
            num_tokens=batch.num_tokens,
            num_preemptions=len(batch.preempted),
        )
