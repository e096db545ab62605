"""The engine: requests go in, updates with their tokens come out, one step at a time.

It knows token ids and no text. Not thread-safe: one thread calls everything. The front doors are
`LLM` and `AsyncEngine`.
"""

import logging
import secrets
import time
from collections.abc import Callable
from functools import partial

from jpaged.config import PreemptionMode
from jpaged.errors import RequestError
from jpaged.execution.runner import LaunchedStep, Runner, Scored
from jpaged.metrics import Metrics
from jpaged.outputs import FinishReason, TokenLogprobs
from jpaged.scheduling.beam_group import BeamGroup
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.prefill_clock import PrefillClock
from jpaged.scheduling.request import Request, RequestStatus
from jpaged.scheduling.request_group import RequestGroup
from jpaged.scheduling.scheduled_batch import ScheduledBatch
from jpaged.scheduling.scheduler import Scheduler
from jpaged.scheduling.swap import PreemptionCosts, SwapSpace
from jpaged.step_timings import StepTimings
from jpaged.updates import RequestUpdate

logger = logging.getLogger(__name__)


class Engine:
    def __init__(
        self,
        runner: Runner,
        metrics: Metrics,
        *,
        enable_prefix_caching: bool = True,
        preemption_mode: PreemptionMode = "auto",
        check_invariants: bool = False,
    ) -> None:
        spec = runner.spec
        self.metrics = metrics
        self._prefill_clock = PrefillClock()
        self.block_pool = BlockPool(spec.kv_cache.num_blocks)
        self.scheduler = Scheduler(
            self.block_pool,
            block_size=spec.kv_cache.block_size,
            max_num_seqs=spec.num_slots,
            max_num_batched_tokens=spec.max_num_tokens,
            enable_prefix_caching=enable_prefix_caching,
            swap_space=self._swap_space(runner, preemption_mode),
        )
        self.max_num_seqs = spec.num_slots
        self.step_timings = StepTimings()
        self._runner = runner
        self._check_invariants = check_invariants
        self._unfinished: set[RequestGroup] = set()
        self._launched: LaunchedStep | None = None

    def check_fits(self, group: RequestGroup) -> None:
        """Raise `RequestError` for a request that could never run. Thread-safe."""
        self.scheduler.limits.check(group.requests[0])

    def add_request(self, group: RequestGroup) -> None:
        """Queue a request that `check_fits` let through."""
        for request in group.requests:
            self.scheduler.add(request)
        self._unfinished.add(group)

    def fork(self, group: RequestGroup, index: int, *, seed: int | None = None) -> int:
        """Let one more answer begin as answer `index` does so far; returns its own index.

        Both share the blocks that are full; the tail is copied by whoever writes first. Without a
        seed one is drawn. Raises `RequestError` if that answer cannot be continued.
        """
        if not group.policy.is_forkable or not 0 <= index < len(group.requests):
            raise RequestError(
                f"index {index} names no answer that can be forked: answers are 0 to "
                f"{len(group.requests) - 1}, those of beam search and best_of are not settled "
                "before the end, and max_tokens 0 has none",
                param="index",
            )
        parent = group.requests[index]
        if parent.is_finished:
            raise RequestError(
                f"answer {index} is finished: nothing goes on from there",
                param="index",
            )
        child = group.fork(parent, secrets.randbits(63) if seed is None else seed)
        self.scheduler.fork(parent, child)
        return child.index

    def abort(self, group: RequestGroup) -> None:
        """End a request and free its blocks; nothing happens if it has finished already."""
        self._end(group, FinishReason.ABORT)

    def stop(self, group: RequestGroup, index: int) -> None:
        """End one sequence of a request, as its text has come to a stop string.

        Tokens that were generated behind it count in the metrics; the client does not get them.
        """
        request = group.requests[index]
        if not request.is_finished:
            self.scheduler.finish(request, FinishReason.STOP)
            self._forget_if_finished(group)

    def fail(self, group: RequestGroup, error: Exception) -> None:
        """End one request, which raised an error, with `FinishReason.ERROR`; all others go on.

        Raises when the error left the books of blocks and slots in disorder: then the answers of
        other requests cannot be trusted any more.
        """
        logger.error("request %s ended by an error", group.request_id, exc_info=error)
        self._end(group, FinishReason.ERROR)
        self.scheduler.check_integrity()

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do."""
        return self.scheduler.has_requests or self._launched is not None

    def step(self) -> list[RequestUpdate]:
        """Schedule and launch a step, then take in the tokens of the step before.

        Returns what is new of the requests that have new tokens or are finished.
        """
        launched_before = self._launched
        batch = self._schedule()
        self._launched = self._launch(batch)
        is_stuck = not (batch.num_tokens or batch.finished or launched_before)
        assert not (is_stuck and self.scheduler.has_requests), "no request can run, ever"
        groups = self._take_in(batch, launched_before)
        self._record(batch)
        return [group.take_update() for group in groups]

    def _schedule(self) -> ScheduledBatch:
        with self.step_timings.measure("scheduling"):
            batch = self.scheduler.schedule()
            if self._check_invariants:
                self.scheduler.check_writes(batch.rows)
        return batch

    def _launch(self, batch: ScheduledBatch) -> LaunchedStep | None:
        """Start what was scheduled. None if there is nothing to compute."""
        with self.step_timings.measure("packing"):
            self._runner.move_blocks(batch)
            packed = self._runner.pack(batch) if batch.num_tokens else None
        with self.step_timings.measure("launching"):
            return self._runner.launch(packed) if packed is not None else None

    def _take_in(self, batch: ScheduledBatch, step: LaunchedStep | None) -> list[RequestGroup]:
        """Take in what scheduling has ended and what a step has computed."""
        progressed = self._take_back_reports(batch)
        progressed += [request.group for request in batch.finished]
        if step is not None:
            with self.step_timings.measure("waiting"):
                tokens, logprobs = step.read_tokens(), step.read_logprobs()
            with self.step_timings.measure("processing"):
                progressed += self._process(step, tokens, logprobs)
            self.step_timings.num_steps += 1
        # A dict keeps the order and drops doubles.
        groups = list(dict.fromkeys(progressed))
        for group in groups:
            self._forget_if_finished(group)
        if self._check_invariants:
            self.scheduler.check_integrity()
        return groups

    def _swap_space(self, runner: Runner, mode: PreemptionMode) -> SwapSpace | None:
        num_blocks = runner.spec.num_swap_blocks
        if not num_blocks:
            return None
        costs = PreemptionCosts(runner.time_swap(), self._prefill_clock)
        return SwapSpace(num_blocks, mode=mode, costs=costs)

    def _process(
        self, step: LaunchedStep, tokens: list[int], logprobs: list[TokenLogprobs | None]
    ) -> list[RequestGroup]:
        """Take in the results of a step. Returns the groups that have something new."""
        has_result = bool(step.requests or step.scored)
        self._prefill_clock.record(step.trace, has_result=has_result, now=time.perf_counter())
        num_sampled = len(tokens)
        # First, so that a first token comes with all that is known of the prompt.
        progressed = self._process_scores(step.scored, logprobs[num_sampled:])
        for request, token, token_logprobs in zip(
            step.requests, tokens, logprobs[:num_sampled], strict=True
        ):
            # A step ahead, one token more may have been sampled than the answer has.
            if not request.is_finished:
                take_in = partial(self._take_token, request, token, token_logprobs)
                progressed += self._contained(request.group, take_in)
        return progressed

    def _contained(self, group: RequestGroup, take_in: Callable[[], bool]) -> list[RequestGroup]:
        """Take in something of one request; an error there ends that request alone.

        Returns the group if it has something new.
        """
        try:
            return [group] if take_in() else []
        except Exception as error:
            self.fail(group, error)
            return [group]

    def _take_token(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> bool:
        group = request.group
        if isinstance(group, BeamGroup):
            return self._report(group, request, logprobs)
        self._append(request, token, logprobs)
        return True

    def _process_scores(
        self, scored: list[Scored], scores: list[TokenLogprobs | None]
    ) -> list[RequestGroup]:
        """Take in log-probabilities of prompts. Returns requests that wanted nothing else."""
        finished, index = [], 0
        for request, positions in scored:
            own = scores[index : index + len(positions)]
            index += len(positions)
            if not request.is_finished:
                take_in = partial(self._take_scores, request, positions, own)
                finished += self._contained(request.group, take_in)
        return finished

    def _take_scores(
        self, request: Request, positions: range, scores: list[TokenLogprobs | None]
    ) -> bool:
        request.append_scores(positions.start, scores)
        self.scheduler.tables.keep_scores(request, positions)
        if not request.policy.generates and request.is_scored:
            request.finish(FinishReason.LENGTH)
            self.scheduler.retire(request)
        return request.is_finished

    def _report(self, group: BeamGroup, beam: Request, logprobs: TokenLogprobs | None) -> bool:
        """Take a beam's logits; once all have come, choose the next beams. True if they did."""
        if beam.status is RequestStatus.WAITING:
            group.withdraw(beam)
            return False
        assert logprobs is not None
        group.report(beam, logprobs)
        if not group.is_complete:
            return False
        last_token_time = beam.last_token_time
        beams, step = group.beams, group.advance()
        if step.survivors:
            self.scheduler.reorder(beams, [survivor.beam for survivor in step.survivors])
            group.go_on(step.survivors)
        for beam in beams:
            if beam in group.beams and step.survivors:
                self._record_token(beam, last_token_time)
            else:
                beam.finish(FinishReason.STOP)
                self.scheduler.retire(beam)
        return True

    def _take_back_reports(self, batch: ScheduledBatch) -> list[RequestGroup]:
        """Let preempted beams report again, and end searches without room with what they have.

        Returns the groups in which that raised an error.
        """
        failed = []
        for request in batch.preempted:
            group = request.group
            if isinstance(group, BeamGroup):
                group.withdraw_reported(request)
        for group in {request.group for request in batch.finished}:
            if isinstance(group, BeamGroup):
                failed += self._contained(group, partial(_end_early, group))
        return failed

    def _append(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> None:
        last_token_time = request.last_token_time
        request.append_token(token, logprobs)
        self._record_token(request, last_token_time)
        if request.is_finished:
            self.scheduler.retire(request)

    def _record_token(self, request: Request, last_token_time: float | None) -> None:
        assert request.last_token_time is not None
        if last_token_time is None:
            self.metrics.record_first_token(request)
            self.metrics.record_prompt(request)
            self.metrics.record_tokens(request, 1, None)
        else:
            self.metrics.record_tokens(request, 1, request.last_token_time - last_token_time)

    def _end(self, group: RequestGroup, reason: FinishReason) -> None:
        """End what is unfinished of a group and free its blocks."""
        for request in group.requests:
            if not request.is_finished:
                self.scheduler.finish(request, reason)
        self._forget_if_finished(group)
        if not self.has_unfinished:  # no step will follow that records the state
            self._record(ScheduledBatch())

    def _forget_if_finished(self, group: RequestGroup) -> None:
        """Count a request that has ended as a whole, once."""
        if group not in self._unfinished or not group.is_finished:
            return
        self._unfinished.remove(group)
        first = group.requests[0]
        if not first.policy.generates and first.is_scored:
            self.metrics.record_prompt(first)
        self.metrics.record_finished(group)

    def _record(self, batch: ScheduledBatch) -> None:
        self.metrics.record_step(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            kv_cache_usage=self.block_pool.usage,
            kv_cache_block_fill=self.scheduler.block_fill,
            num_tokens=batch.num_tokens + batch.num_hidden_tokens,
            num_preemptions=len(batch.preempted),
            num_swap_outs=sum(len(out.swapped.tables) for out in batch.swap_outs),
            num_swapped=self.scheduler.num_swapped,
        )


def _end_early(group: BeamGroup) -> bool:
    group.end_early()
    return False
