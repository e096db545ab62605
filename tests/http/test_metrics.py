"""The numbers add up (O-63), over a scrape of a server and by direct calls."""

import time
from collections.abc import Callable

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from jpaged.metrics import Metrics, buckets_1_2_5
from jpaged.outputs import FinishReason
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.request import Request
from jpaged.scheduling.request_group import RequestGroup
from tests.http.conftest import RunningServer
from tests.http.test_disconnect import long_body, send, wait_until

COMPLETIONS = "/v1/completions"


def families(content: bytes) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(content.decode())}


def values(content: bytes) -> dict[str, float]:
    """Sums over all labels but the buckets of histograms."""
    sums: dict[str, float] = {}
    for family in families(content).values():
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                name = sample.name.removeprefix("jpaged:")
                reason = sample.labels.get("finished_reason")
                name = name if reason is None else f"{name}[{reason}]"
                sums[name] = sums.get(name, 0) + sample.value
    return sums


def scrape(server: RunningServer) -> dict[str, float]:
    with server.client() as client:
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return values(response.content)


def test_names_and_labels() -> None:
    """vLLM's names with another prefix; every sample has the model's name."""
    content, _ = Metrics(model_name="m", max_model_len=100).render()
    found = families(content)
    assert {name.removeprefix("jpaged:") for name in found if not name.endswith("_created")} == {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("kv_cache_block_fill_perc", "num_requests_swapped", "num_swap_outs"),
        *("num_preemptions", "prompt_tokens", "generation_tokens", "request_success"),
        *("prefix_cache_queries", "prefix_cache_hits", "iteration_tokens_total"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_inference_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"),
    }
    for family in found.values():
        assert all(sample.labels["model_name"] == "m" for sample in family.samples)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2]), (64, [1, 2, 5, 10, 20, 50]), (1000, 1000), (8192, 5000)],
)
def test_token_buckets(largest: int, expected: list[int] | int) -> None:
    buckets = buckets_1_2_5(largest)
    if isinstance(expected, int):
        assert buckets[-1] == expected
    else:
        assert buckets == expected


def test_every_request_is_counted_once(server: RunningServer) -> None:
    """O-63: 10 finished, 5 aborted, 3 refused."""
    before = scrape(server)
    for number in range(10):
        body = {"prompt": "a" * (number + 1), "max_tokens": 4, "ignore_eos": True}
        assert server.post(COMPLETIONS, body).status_code == 200
    for _ in range(3):
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 10**6}).status_code == 400
    server.engine.seconds_per_token = 0.01
    for _ in range(5):
        connection = send(server, COMPLETIONS, long_body(COMPLETIONS, "abc"))
        wait_until(lambda: bool(server.engine.running), 5)
        connection.close()
        wait_until(lambda: not server.engine.running, 5)
    after = scrape(server)

    change = {name: after[name] - before[name] for name in after}
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert all(value >= 0 for name, value in change.items() if name not in gauges)
    assert change["request_success_total[length]"] == 10
    assert change["request_success_total[abort]"] == 5
    assert change["e2e_request_latency_seconds_count"] == 15
    assert change["request_prompt_tokens_count"] == 15
    assert change["request_prompt_tokens_sum"] == sum(range(1, 11)) + 5 * 3
    assert change["request_generation_tokens_sum"] == change["generation_tokens_total"]


# Directly, as aborts before the first token and preemptions cannot be had from a script.


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(model_name="m", max_model_len=100)


@pytest.fixture
def make_request() -> Callable[[], Request]:
    return lambda: Request("r", [1, 2, 3], SamplingParams(detokenize=False), max_tokens=16)


def run_to_the_end(metrics: Metrics, request: Request, num_tokens: int) -> None:
    request.first_scheduled_time = time.monotonic()
    for number in range(num_tokens):
        request.append_token(7)
        if number == 0:
            metrics.record_first_token(request)
            metrics.record_prompt(request)
        metrics.record_tokens(request, 1, 0.5 if number else None)
    request.finish(FinishReason.STOP)
    metrics.record_finished(RequestGroup(0, [request]))


def assert_stages_add_up(found: dict[str, float]) -> None:
    whole = found["e2e_request_latency_seconds_sum"]
    parts = [found[f"request_{stage}_time_seconds_sum"] for stage in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(whole)
    assert min(parts) >= 0


def test_stages_of_a_request(metrics: Metrics, make_request: Callable[[], Request]) -> None:
    run_to_the_end(metrics, make_request(), 4)
    found = values(metrics.render()[0])
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["inter_token_latency_seconds_sum"] == 1.5
    assert found["request_params_max_tokens_sum"] == 16
    assert_stages_add_up(found)


def test_an_answer_of_one_token_has_no_time_per_token(
    metrics: Metrics, make_request: Callable[[], Request]
) -> None:
    run_to_the_end(metrics, make_request(), 1)
    found = values(metrics.render()[0])
    assert found["request_time_per_output_token_seconds_count"] == 0
    assert found["time_to_first_token_seconds_count"] == 1


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_aborted_before_the_first_token(
    metrics: Metrics, make_request: Callable[[], Request], is_scheduled: bool
) -> None:
    """O-63: counted in every histogram of requests, but for the times of tokens."""
    request = make_request()
    if is_scheduled:
        request.first_scheduled_time = time.monotonic()
    request.finish(FinishReason.ABORT)
    metrics.record_finished(RequestGroup(0, [request]))
    found = values(metrics.render()[0])
    assert found["request_success_total[abort]"] == 1
    assert found["time_to_first_token_seconds_count"] == 0
    assert found["prompt_tokens_total"] == 0
    counts = {name for name in found if name.startswith(("request_", "e2e")) and "_count" in name}
    counts -= {"request_time_per_output_token_seconds_count"}
    assert len(counts) == 8
    assert {found[name] for name in counts} == {1}
    assert_stages_add_up(found)


def test_steps(metrics: Metrics) -> None:
    """O-63: a count that goes down is dropped, and does not raise in the engine's loop."""
    state = {"num_running": 3, "num_waiting": 2, "kv_cache_usage": 0.5, "kv_cache_block_fill": 0.9}
    metrics.record_step(**state, num_tokens=10, num_preemptions=1, num_swap_outs=1, num_swapped=2)
    metrics.record_step(**state, num_tokens=0, num_preemptions=-1, num_swap_outs=-1, num_swapped=1)
    found = values(metrics.render()[0])
    assert found["num_requests_running"] == 3
    assert found["num_requests_waiting"] == 2
    assert found["num_requests_swapped"] == 1
    assert found["kv_cache_usage_perc"] == 0.5
    assert found["kv_cache_block_fill_perc"] == 0.9
    assert found["num_preemptions_total"] == 1
    assert found["num_swap_outs_total"] == 1
    assert found["iteration_tokens_total_count"] == 1


def test_recording_is_cheap(metrics: Metrics, make_request: Callable[[], Request]) -> None:
    """Called for every token; tests run with type checks, so the bound is loose."""
    request = make_request()
    request.append_token(7)
    started = time.perf_counter()
    for _ in range(1000):
        metrics.record_tokens(request, 1, 0.02)
    assert (time.perf_counter() - started) / 1000 < 200e-6


def test_engines_do_not_share_numbers() -> None:
    first, second = (Metrics(model_name="m", max_model_len=100) for _ in range(2))
    state = {"num_running": 1, "num_waiting": 0, "kv_cache_usage": 0.0, "kv_cache_block_fill": 1.0}
    first.record_step(**state, num_tokens=1, num_preemptions=1, num_swap_outs=1, num_swapped=2)
    assert values(second.render()[0])["num_preemptions_total"] == 0
