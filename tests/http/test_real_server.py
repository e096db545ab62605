"""The demo model behind `jpaged serve`, over real HTTP. One process for all tests, which the last
one ends."""

import concurrent.futures
import json
import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from jpaged.cli.options import flag
from tests.demo_engine import DEMO_OPTIONS, MAX_MODEL_LEN
from tests.http.sse import DONE, parse_events
from tests.http.test_disconnect import wait_until
from tests.http.test_metrics import values

pytestmark = pytest.mark.slow

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 60
MODEL = "smollm2-135m-instruct"
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
def process(programs_folder: Path) -> Iterator[Process]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jpaged", "serve", "--port", str(port), "--check-invariants"]
    options = DEMO_OPTIONS | {
        "shutdown_timeout": STOP_TIMEOUT_S,
        "compilation_cache_dir": programs_folder,
    }
    command += [word for name, value in options.items() for word in (flag(name), str(value))]
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


def test_several_answers(process: Process) -> None:
    """O-11, O-35, O-38: more than run at once, by prompt; the same streamed and not."""
    body = {"prompt": PROMPTS[:2], "n": 3, "max_tokens": 12, "seed": 3, "temperature": 1}
    url = f"{process.url}/v1/completions"
    whole = httpx.post(url, json=body, timeout=60).json()
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert len(set(texts)) == 6
    one = httpx.post(url, json=body | {"prompt": PROMPTS[1]}, timeout=60).json()
    assert [choice["text"] for choice in one["choices"]] == texts[3:]

    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage_chunk, last = parse_events(
        httpx.post(url, json=body | options, timeout=60).content
    )
    assert last == DONE
    assert usage_chunk["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert usage_chunk["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    for index, expected in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons == [None] * (len(own) - 1) + [expected["finish_reason"]]


def test_beam_search(process: Process, client: OpenAI) -> None:
    """The best first; what is streamed is what every answer begins with, then the best one."""
    beams = {"use_beam_search": True, "beam_width": 3, "length_penalty": 1.0}
    wanted: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 12}
    whole = client.completions.create(**wanted, n=3, logprobs=0, extra_body=beams)
    scores = []
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        logprobs = [logprob or 0.0 for logprob in choice.logprobs.token_logprobs]
        scores.append(sum(logprobs) / len(logprobs))
    assert len({choice.text for choice in whole.choices}) == 3
    assert scores == sorted(scores, reverse=True)
    stream = client.completions.create(**wanted, stream=True, extra_body=beams)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    wait_until(process.is_idle, 5)


def test_logprobs_of_completions(client: OpenAI) -> None:
    """O-23, O-25, O-26: of text with characters that span tokens; values before the filters."""
    prompt = "The word for Chinese characters in Japanese is 漢字 (kanji), written 漢字 and"
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "logprobs": 5}
    answers = [
        client.completions.create(**options, temperature=temperature, extra_body={"top_k": 1})
        for temperature in (0, 0.5)
    ]
    choices = [answer.choices[0] for answer in answers]
    logprobs, others = choices[0].logprobs, choices[1].logprobs
    assert logprobs is not None and others is not None
    # The second prompt is partly cached, so its tokens are computed in another batch.
    assert others.tokens == logprobs.tokens and others.text_offset == logprobs.text_offset
    assert others.token_logprobs == pytest.approx(logprobs.token_logprobs, abs=1e-4)
    tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
    own, top = logprobs.token_logprobs or [], logprobs.top_logprobs or []
    assert len(tokens) == len(offsets) == len(own) == len(top) == 24
    for token, offset in zip(tokens, offsets, strict=True):
        assert "\ufffd" in token or choices[0].text[offset:].startswith(token)
    for token, logprob, likely in zip(tokens, own, top, strict=True):
        assert likely[token] == logprob == max(likely.values())
        assert sum(map(math.exp, likely.values())) < 1.0001


def test_logprobs_of_chats(client: OpenAI) -> None:
    """O-23: streamed and not; sampled tokens have the value that they have in the list."""
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Write a short poem."}],
        "max_completion_tokens": 16,
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 20,
    }
    whole = client.chat.completions.create(**options)
    joined: list[list[Any]] = [[], []]
    for chunk in client.chat.completions.create(**options, stream=True):
        logprobs = chunk.choices[0].logprobs
        joined[chunk.choices[0].index] += (logprobs.content or []) if logprobs else []
    for choice, streamed in zip(whole.choices, joined, strict=True):
        entries = choice.logprobs.content if choice.logprobs else None
        assert entries is not None and len(entries) == 16
        assert [entry.token for entry in entries] == [entry.token for entry in streamed]
        assert [entry.logprob for entry in entries] == pytest.approx(
            [entry.logprob for entry in streamed], abs=1e-3
        )
        assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == (
            choice.message.content
        )
        for entry in entries:
            found = [each.logprob for each in entry.top_logprobs if each.token == entry.token]
            assert found in ([], [entry.logprob])
            values = [each.logprob for each in entry.top_logprobs]
            assert len(values) == 20 and values == sorted(values, reverse=True)


def test_scoring(process: Process) -> None:
    """O-06, O-25: a text gets the values that it was generated with, cached or not."""
    url = f"{process.url}/v1/completions"
    body: dict[str, Any] = {"prompt": "1, 2, 3, 漢字, " * 4, "echo": True, "logprobs": 2}
    generated = {"max_tokens": 6, "temperature": 0, "return_token_ids": True}
    (choice,) = httpx.post(url, json=body | generated, timeout=60).json()["choices"]
    assert len(choice["prompt_token_ids"]) > 32
    body |= {"prompt": choice["prompt_token_ids"] + choice["token_ids"], "max_tokens": 0}
    for salt in ("new", "new", "other"):
        scored = httpx.post(url, json=body | {"cache_salt": salt}, timeout=60).json()
        found = scored["choices"][0]
        assert (found["text"], scored["usage"]["completion_tokens"]) == (choice["text"], 0)
        for name in ("tokens", "text_offset"):
            assert found["logprobs"][name] == choice["logprobs"][name]
        first, *values = found["logprobs"]["token_logprobs"]
        assert first is None and found["logprobs"]["top_logprobs"][0] is None
        assert values == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-3)
        top = found["logprobs"]["top_logprobs"][-6:]
        assert [max(each.values()) for each in top] == values[-6:]


def test_echo_of_beams(process: Process, client: OpenAI) -> None:
    """The prompt is in front of each answer, streamed too."""
    wanted: dict[str, Any] = {"model": MODEL, "prompt": PROMPTS[2], "max_tokens": 5, "echo": True}
    beams = {"use_beam_search": True, "beam_width": 2}
    whole = client.completions.create(**wanted, n=2, logprobs=0, extra_body=beams)
    assert whole.usage is not None
    for choice in whole.choices:
        assert choice.text.startswith(PROMPTS[2])
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
        assert len(choice.logprobs.tokens) == whole.usage.prompt_tokens + 5
    stream = client.completions.create(**wanted, logprobs=0, stream=True, extra_body=beams)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


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
