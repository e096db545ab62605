"""The demo model behind `jpaged serve`, over real HTTP. One process for all tests, which the last
one ends."""

import concurrent.futures
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.http.sse import DONE, parse_events
from tests.http.test_disconnect import wait_until
from tests.http.test_metrics import values

pytestmark = pytest.mark.slow

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60
MODEL = "smollm2-135m-instruct"
MAX_MODEL_LEN = 512
OPTIONS = {
    "--max-model-len": MAX_MODEL_LEN,
    "--max-num-seqs": 4,
    "--max-num-batched-tokens": 32,
    "--num-gpu-blocks-override": 100,
    "--shutdown-timeout": STOP_TIMEOUT_S,
}
PROMPTS = ["The capital of France is", "Once upon a time", "1, 2, 3, 4,"]


@dataclass
class Process:
    """The server, what it printed, and what /health said before it was ready."""

    popen: subprocess.Popen[str]
    url: str
    output: list[str] = field(default_factory=list)
    early_statuses: set[int] = field(default_factory=set)

    def metrics(self) -> dict[str, float]:
        return values(httpx.get(f"{self.url}/metrics").content)

    def is_idle(self) -> bool:
        found = self.metrics()
        return found["num_requests_running"] == 0 and found["kv_cache_usage_perc"] == 0

    def complete(self, prompt: str, **body: Any) -> str:
        body |= {"prompt": prompt, "temperature": 0}
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jpaged", "serve", "--port", str(port), "--check-invariants"]
    command += [str(word) for option in OPTIONS.items() for word in option]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    started = Process(popen, f"http://127.0.0.1:{port}")
    reader = threading.Thread(target=lambda: started.output.extend(popen.stdout or ()))
    reader.start()
    try:
        wait_until(lambda: is_ready(started), START_TIMEOUT_S)
        yield started
    finally:
        popen.kill()
        popen.wait()
        reader.join()
        assert popen.stdout is not None
        popen.stdout.close()


@pytest.fixture
def client(process: Process) -> Iterator[OpenAI]:
    base_url = f"{process.url}/v1"
    with OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as openai_client:
        yield openai_client


def is_ready(process: Process) -> bool:
    assert process.popen.poll() is None, "the server ended"
    try:
        status = httpx.get(f"{process.url}/health", timeout=5).status_code
    except httpx.TransportError:
        return False
    if status != 200:
        process.early_statuses.add(status)
    return status == 200


def test_start(process: Process, client: OpenAI) -> None:
    """O-60: health says 503 while programs compile; then the URL and a command are printed."""
    assert process.early_statuses == {503}
    wait_until(lambda: "curl" in "".join(process.output), 5)
    assert process.url in "".join(process.output)
    (model,) = client.models.list().data
    assert (model.id, model.model_dump()["max_model_len"]) == (MODEL, MAX_MODEL_LEN)


def test_the_printed_command_is_a_good_request(process: Process) -> None:
    line = next(line for line in process.output if line.startswith("curl"))
    url, body = line.split()[1], line[line.index("-d '") + 4 : line.rindex("'")]
    response = httpx.post(url, json={**json.loads(body), "max_tokens": 4}, timeout=60)
    assert response.status_code == 200, response.text


def test_completion(client: OpenAI) -> None:
    completion = client.completions.create(
        model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=8
    )
    assert completion.choices[0].text.startswith(" Paris")
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None and completion.usage.completion_tokens == 8


def test_chat(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_completion_tokens=24,
    )
    assert "Paris" in (completion.choices[0].message.content or "")


def test_streams_are_the_same_text(process: Process, client: OpenAI) -> None:
    """R6"""
    whole = process.complete(PROMPTS[1], max_tokens=24)
    chunks = client.completions.create(
        model=MODEL, prompt=PROMPTS[1], temperature=0, max_tokens=24, stream=True
    )
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts) == whole
    assert len(texts) > 4


def test_stop_string(client: OpenAI) -> None:
    """O-28: cut inside a token, " Paris"."""
    completion = client.completions.create(
        model=MODEL, prompt=PROMPTS[0], temperature=0, max_tokens=8, stop="ari"
    )
    assert completion.choices[0].text == " P"
    assert completion.choices[0].finish_reason == "stop"


def test_several_at_once_say_what_each_says_alone(process: Process, client: OpenAI) -> None:
    """O-35, O-36: as prompts of one request and as requests side by side."""
    alone = [process.complete(prompt, max_tokens=16) for prompt in PROMPTS]
    together = client.completions.create(model=MODEL, prompt=PROMPTS, temperature=0, max_tokens=16)
    assert [choice.text for choice in together.choices] == alone
    with concurrent.futures.ThreadPoolExecutor() as pool:
        side_by_side = pool.map(lambda prompt: process.complete(prompt, max_tokens=16), PROMPTS)
    assert list(side_by_side) == alone


def test_seeds(process: Process) -> None:
    body = {"model": MODEL, "prompt": PROMPTS[1], "max_tokens": 12, "temperature": 1.0}
    texts = [
        httpx.post(f"{process.url}/v1/completions", json={**body, "seed": seed}, timeout=60).json()[
            "choices"
        ][0]["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_frees_all_blocks(process: Process, stream: bool) -> None:
    """O-42, R4: within a second, and no more tokens are made."""
    for _ in range(3):
        body = {"prompt": PROMPTS, "max_tokens": 400, "ignore_eos": True, "stream": stream}
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=0.5) as answer,
        ):
            next(answer.iter_bytes())
            raise httpx.ReadTimeout("as if")
        wait_until(process.is_idle, 2)
    before = process.metrics()["generation_tokens_total"]
    time.sleep(0.3)
    assert process.metrics()["generation_tokens_total"] == before


REFUSED: list[dict[str, Any]] = [
    {"prompt": [999_999]},
    {"prompt": [-1]},
    {"prompt": ""},
    {"prompt": "word " * MAX_MODEL_LEN},
    {"prompt": "a", "max_tokens": MAX_MODEL_LEN},
    {"prompt": "a", "max_tokens": 10**12},
    {"prompt": "a", "stop_token_ids": [10**6]},
    {"prompt": ["a", "word " * MAX_MODEL_LEN]},
]


@pytest.mark.parametrize("body", REFUSED)
def test_refusals(process: Process, body: dict[str, Any]) -> None:
    """O-10, O-37: and a normal request after each."""
    response = httpx.post(f"{process.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert process.complete(PROMPTS[0], max_tokens=1) == " Paris"


@pytest.mark.parametrize("given", [{"top_k": 10**30}, {"seed": -(2**63)}, {"temperature": 1e-300}])
def test_extreme_numbers_do_no_harm(process: Process, given: dict[str, Any]) -> None:
    """Refused or taken, but the engine lives: these do not fit the device's types."""
    body = {"prompt": "a", "max_tokens": 2, **given}
    response = httpx.post(f"{process.url}/v1/completions", json=body, timeout=60)
    assert response.status_code in (200, 400), response.text
    assert process.complete(PROMPTS[0], max_tokens=1) == " Paris"


def test_a_huge_text_delays_nobody(process: Process) -> None:
    """O-57: it is refused, and small requests go on while it is."""
    huge = {"prompt": "hello " * 1_500_000}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        refusal = pool.submit(httpx.post, f"{process.url}/v1/completions", json=huge, timeout=120)
        time.sleep(0.3)
        started = time.monotonic()
        process.complete(PROMPTS[0], max_tokens=1)
        seconds = time.monotonic() - started
        assert refusal.result().status_code == 400
    assert seconds < 2


def test_metrics_add_up(process: Process) -> None:
    """O-63: over all that the tests before this one did."""
    wait_until(process.is_idle, 5)
    found = process.metrics()
    ended = sum(value for name, value in found.items() if name.startswith("request_success"))
    assert ended == found["e2e_request_latency_seconds_count"] > 10
    assert found["request_success_total[abort]"] >= 6
    assert found["generation_tokens_total"] == found["request_generation_tokens_sum"]
    assert found["time_to_first_token_seconds_count"] <= ended
    assert found["num_requests_waiting"] == 0


def test_sigterm_lets_streams_finish(process: Process) -> None:
    """O-60: new requests are refused, the stream goes on to its end, the exit code is 0."""
    body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    url = f"{process.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        parts = response.iter_bytes()
        received = next(parts)
        process.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(f"{process.url}/health").status_code == 503, 2)
        refused = httpx.post(url, json={"prompt": "a"})
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        received += b"".join(parts)
    *chunks, last = parse_events(received)
    assert last == DONE
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len(chunks) == 100
    assert process.popen.wait(STOP_TIMEOUT_S) == 0
