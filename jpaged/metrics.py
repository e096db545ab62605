"""Counters and histograms that the engine updates, in Prometheus' form. No HTTP, no JAX.

Names and buckets are vLLM's with another prefix, so that dashboards can be reused.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from jpaged.outputs import FinishReason, RequestTiming
from jpaged.scheduling.request import Request
from jpaged.scheduling.request_group import RequestGroup

PREFIX = "jpaged:"
LABELS = ("model_name",)

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
TOKEN_LATENCY_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20),
    *(40, 80),
)
REQUEST_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920),
    7680,
)
ITERATION_TOKENS_BUCKETS = (1, 8, *(2**power for power in range(4, 15)))


def buckets_1_2_5(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50... up to `largest`."""
    buckets = [1]
    for exponent in range(len(str(largest))):
        buckets += [factor * 10**exponent for factor in (2, 5, 10)]
    return [bucket for bucket in buckets if bucket <= largest]


class Metrics:
    """The numbers of one engine. One thread records, any thread renders.

    Request histograms have one observation for every finished request, aborted ones included, and
    however many sequences it has: generated tokens are those of all sequences, and the time of a
    token is that of the longest one. A stage that a request never reached counts as 0 seconds. Two
    differ, as they would hold made-up values otherwise: time_to_first_token_seconds counts requests
    that got a token, and request_time_per_output_token_seconds those that got two. The counter of
    prompt tokens leaves out the prompts of requests that were aborted before their first token.
    """

    def __init__(self, *, model_name: str, max_model_len: int) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._make_step_metrics()
        self._make_token_metrics()
        self._make_request_metrics(buckets_1_2_5(max_model_len))

    def record_step(
        self,
        *,
        num_running: int,
        num_waiting: int,
        kv_cache_usage: float,
        kv_cache_block_fill: float,
        num_tokens: int,
        num_preemptions: int,
        num_swap_outs: int,
        num_swapped: int,
    ) -> None:
        """After a step: the state now, and what happened since the call before.

        kv_cache_usage: share of the blocks in use, from 0 to 1.
        kv_cache_block_fill: share of the slots of those blocks that hold tokens, from 0 to 1.
        num_tokens: tokens computed in this step, and those copied from partly equal blocks of
            the prefix cache; 0 records the state alone.
        num_preemptions: requests preempted since the call before.
        num_swap_outs: those of them whose blocks went to host memory.
        num_swapped: requests whose blocks are there now.
        """
        self._num_running.set(num_running)
        self._num_waiting.set(num_waiting)
        self._num_swapped.set(num_swapped)
        self._kv_cache_usage.set(kv_cache_usage)
        self._kv_cache_block_fill.set(kv_cache_block_fill)
        if num_tokens > 0:
            self._iteration_tokens.observe(num_tokens)
        _add(self._num_preemptions, num_preemptions)
        _add(self._num_swap_outs, num_swap_outs)

    def record_stopped(self) -> None:
        """The engine has stopped: nothing runs, waits or holds memory any more."""
        for gauge in (self._num_running, self._num_waiting, self._num_swapped):
            gauge.set(0)
        self._kv_cache_usage.set(0)

    def record_prompt(self, request: Request) -> None:
        """Count a computed prompt, once however many answers it has, as their usage does."""
        if request.index == 0:
            _add(self._prompt_tokens, request.num_prompt_tokens)
            _add(self._prefix_cache_queries, request.num_prompt_tokens)
            _add(self._prefix_cache_hits, request.num_cached_tokens)

    def record_first_token(self, request: Request) -> None:
        """The first token is there; `record_tokens` counts it, and `record_prompt` the prompt.

        Of several sequences the first one counts, which no other one precedes.
        """
        assert request.first_token_time is not None, f"{request.request_id} has no token"
        if request.index == 0:
            self._time_to_first_token.observe(request.first_token_time - request.arrival_time)

    def record_tokens(
        self, request: Request, num_new_tokens: int, seconds_since_last: float | None
    ) -> None:
        """All tokens of an answer pass here once; the first has no `seconds_since_last`."""
        _add(self._generation_tokens, num_new_tokens)
        if seconds_since_last is None:
            return
        for _ in range(num_new_tokens):
            self._inter_token_latency.observe(seconds_since_last / num_new_tokens)

    def record_finished(self, group: RequestGroup) -> None:
        """Once for every accepted request, however it ended."""
        reason, timing = group.finish_reason, group.timing
        assert reason is not None, f"{group.request_id} is not finished"
        assert timing.finished is not None, f"{group.request_id} is not finished"
        lengths = [request.num_output_tokens for request in group.requests]
        self._success[reason].inc()
        self._request_prompt_tokens.observe(group.num_prompt_tokens)
        self._request_generation_tokens.observe(sum(lengths))
        self._request_max_tokens.observe(group.requests[0].max_tokens)
        self._record_stages(timing, timing.finished, max(lengths))

    def render(self) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _record_stages(self, timing: RequestTiming, finished: float, num_tokens: int) -> None:
        """num_tokens: generated tokens of the longest sequence."""
        scheduled = timing.first_scheduled or finished
        first_token = timing.first_token or finished
        self._e2e_latency.observe(finished - timing.arrival)
        self._queue_time.observe(scheduled - timing.arrival)
        self._inference_time.observe(finished - scheduled)
        self._prefill_time.observe(first_token - scheduled)
        self._decode_time.observe(finished - first_token)
        if num_tokens > 1:
            self._time_per_output_token.observe((finished - first_token) / (num_tokens - 1))

    def _make_step_metrics(self) -> None:
        self._num_running = self._gauge("num_requests_running", "Requests that run")
        self._num_waiting = self._gauge("num_requests_waiting", "Requests that wait to run")
        self._num_swapped = self._gauge(
            "num_requests_swapped", "Waiting requests whose KV blocks are in host memory"
        )
        self._kv_cache_block_fill = self._gauge(
            "kv_cache_block_fill_perc", "Share of the slots of used blocks that hold tokens"
        )
        self._kv_cache_usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache's blocks in use; 1 is all of them"
        )
        self._num_preemptions = self._counter("num_preemptions", "Preemptions of requests")
        self._num_swap_outs = self._counter(
            "num_swap_outs", "Preemptions that moved KV blocks to host memory"
        )
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total",
            "Tokens computed in a step, or copied from partly equal cached blocks",
            ITERATION_TOKENS_BUCKETS,
        )

    def _make_token_metrics(self) -> None:
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests that reached their first token"
        )
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self._prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache, in whole blocks"
        )
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", FIRST_TOKEN_BUCKETS
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "From one token to the next", TOKEN_LATENCY_BUCKETS
        )

    def _make_request_metrics(self, token_buckets: Sequence[int]) -> None:
        success = self._counter_family(
            "request_success", "Finished requests by the reason why they ended", "finished_reason"
        )
        self._success = {
            reason: success.labels(self._model_name, reason.value) for reason in FinishReason
        }
        self._request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request", token_buckets
        )
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens",
            "Generated tokens of all sequences of a request",
            token_buckets,
        )
        self._request_max_tokens = self._histogram(
            "request_params_max_tokens", "Most tokens that a request may generate", token_buckets
        )
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of a token after the first, of requests with two tokens or more",
            TOKEN_LATENCY_BUCKETS,
        )
        self._e2e_latency = self._stage("e2e_request_latency", "From arrival to the end")
        self._queue_time = self._stage("request_queue_time", "From arrival to the first step")
        self._inference_time = self._stage("request_inference_time", "From first step to end")
        self._prefill_time = self._stage("request_prefill_time", "From first step to first token")
        self._decode_time = self._stage("request_decode_time", "From first token to the end")

    def _stage(self, name: str, help_text: str) -> Histogram:
        return self._histogram(f"{name}_seconds", help_text, REQUEST_LATENCY_BUCKETS)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        family = Gauge(PREFIX + name, help_text, LABELS, registry=self._registry)
        return family.labels(self._model_name)

    def _counter(self, name: str, help_text: str) -> Counter:
        return self._counter_family(name, help_text).labels(self._model_name)

    def _counter_family(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help_text, (*LABELS, *labels), registry=self._registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[int | float]) -> Histogram:
        family = Histogram(
            PREFIX + name, help_text, LABELS, registry=self._registry, buckets=buckets
        )
        return family.labels(self._model_name)


def _add(counter: Counter, amount: int) -> None:
    """Counters refuse to fall by raising, and a metric must never stop the engine loop."""
    if amount > 0:
        counter.inc(amount)
