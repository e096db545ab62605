"""Streams, down to their bytes."""

import concurrent.futures
import time
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from jpaged.errors import EngineDeadError
from tests.http.conftest import RunningServer
from tests.http.scripted_engine import MODEL_NAME
from tests.http.sse import DONE, parse_events

pytestmark = pytest.mark.smoke

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def stream(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_events(response.content)


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in mine)


# A normal answer, one cut by length, one of one token, an empty one, a stop string at the start.
ENDINGS = [
    ({}, "stop"),
    ({"max_tokens": 3}, "length"),
    ({"max_tokens": 1}, "length"),
    ({"stop_token_ids": [58]}, "stop"),
    ({"stop": "["}, "stop"),
]


@pytest.mark.parametrize(("given", "reason"), ENDINGS)
def test_form_of_chat_chunks(server: RunningServer, given: dict[str, Any], reason: str) -> None:
    """O-39, and R6: joined deltas are the text without streaming."""
    *chunks, last = stream(server, CHAT, {"messages": MESSAGES, **given})
    assert last == DONE
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["object"] == "chat.completion.chunk"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    roles = [chunk["choices"][0]["delta"].get("role") for chunk in chunks]
    assert roles == ["assistant"] + [None] * (len(chunks) - 1)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [reason]
    whole = server.post(CHAT, {"messages": MESSAGES, **given}).json()
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("given", "reason"), ENDINGS)
def test_form_of_completion_chunks(
    server: RunningServer, given: dict[str, Any], reason: str
) -> None:
    """O-39, and R6."""
    *chunks, last = stream(server, COMPLETIONS, {"prompt": "hi", **given})
    assert last == DONE
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        assert chunk["choices"][0].keys() >= {"index", "text", "logprobs", "finish_reason"}
    # The package's type of a choice wants a finish reason, which only the last chunk has.
    Completion.model_validate(chunks[-1], strict=True)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [reason]
    whole = server.post(COMPLETIONS, {"prompt": "hi", **given}).json()
    assert text_of(chunks) == whole["choices"][0]["text"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("given", [{}, {"max_tokens": 3}, {"stop": "hi"}])
def test_usage_comes_once_at_the_end(
    server: RunningServer, path: str, given: dict[str, Any]
) -> None:
    """O-38: finish by end of sequence, by length and by a stop string."""
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": ["hi", "you"]}
    options = {"stream_options": {"include_usage": True}}
    *chunks, usage_chunk, last = stream(server, path, {**prompt, **given, **options})
    assert last == DONE
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage_chunk["choices"] == []
    assert usage_chunk["usage"] == server.post(path, {**prompt, **given}).json()["usage"]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_no_usage_unless_asked_for(server: RunningServer, options: dict[str, Any]) -> None:
    """O-38"""
    *chunks, _ = stream(server, COMPLETIONS, {"prompt": "hi", **options})
    assert all("usage" not in chunk for chunk in chunks)


def test_prompts_are_streamed_side_by_side(server: RunningServer) -> None:
    """O-35, O-39: each choice has its own text and finishes once, last of its own."""
    server.engine.seconds_per_token = 0.005
    *chunks, last = stream(
        server, COMPLETIONS, {"prompt": ["first", "2", "third one"], "max_tokens": 99}
    )
    assert last == DONE
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order), "one after the other"
    for index, word in enumerate(["first", "2", "third one"]):
        assert text_of(chunks, index) == f"[{word}]"
        own = [
            c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["index"] == index
        ]
        assert own == [None] * (len(own) - 1) + ["stop"]


def test_token_ids_of_streams(server: RunningServer) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    body = {"prompt": "ab", "return_token_ids": True, "max_tokens": 4}
    *chunks, _ = stream(server, COMPLETIONS, body)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [c.get("prompt_token_ids") for c in choices] == [tokenizer.encode("ab"), *[None] * 3]
    assert sum((c["token_ids"] for c in choices), []) == tokenizer.encode("[ab]")
    *chunks, _ = stream(server, CHAT, {**body, "messages": MESSAGES} | {"prompt": None})
    assert chunks[0]["prompt_token_ids"] == tokenizer.encode_chat(MESSAGES)
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


def test_chunks_come_as_they_are_made(server: RunningServer) -> None:
    server.engine.seconds_per_token = 0.05
    with server.client() as client:
        body = {"prompt": "hello", "stream": True}
        with client.stream("POST", COMPLETIONS, json=body) as response:
            times = [time.monotonic() for _ in response.iter_bytes()]
    assert times[-1] - times[0] > 0.2


def test_the_openai_package_reads_streams(openai_client: OpenAI) -> None:
    chat = openai_client.chat.completions.create(
        model=MODEL_NAME,
        messages=MESSAGES,  # pyright: ignore
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
    assert text == "[<user>hi\n<assistant>]"
    completion = openai_client.completions.create(model=MODEL_NAME, prompt="hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in completion) == "[hi]"


@pytest.mark.parametrize("prompt", ["hi", ["hi", "you"]])
@pytest.mark.parametrize(
    ("failure", "code"),
    [(EngineDeadError("the loop is dead"), "engine_dead"), (ValueError("oops"), "internal_error")],
)
def test_an_error_in_mid_stream_is_an_event(
    server: RunningServer, prompt: Any, failure: Exception, code: str
) -> None:
    """O-60: no hang and no answer that looks complete; what is unexpected stays in the log."""
    server.engine.seconds_per_token = 0.02
    with server.client() as client:
        body = {"prompt": prompt, "stream": True, "max_tokens": 100, "ignore_eos": True}
        with client.stream("POST", COMPLETIONS, json=body) as response:
            parts = response.iter_bytes()
            received = next(parts)
            server.engine.failure = failure
            received += b"".join(parts)
    events = parse_events(received)
    assert events[-1]["error"]["code"] == code
    assert "oops" not in events[-1]["error"]["message"]
    assert all("choices" in event for event in events[:-1])
    assert not server.engine.running


def test_the_openai_package_raises_errors_in_mid_stream(
    server: RunningServer, openai_client: OpenAI
) -> None:
    server.engine.failure = EngineDeadError("the loop is dead")
    chunks = openai_client.completions.create(model=MODEL_NAME, prompt="hi", stream=True)
    with pytest.raises(openai.APIError, match="the loop is dead"):
        list(chunks)


def test_slow_readers_get_every_token(openai_client: OpenAI) -> None:
    """O-40: 32 streams of 64 tokens, a pause at each chunk."""

    def read(number: int) -> str:
        prompt = f"prompt {number} " * 5
        chunks = openai_client.completions.create(
            model=MODEL_NAME, prompt=prompt, max_tokens=64, stream=True, timeout=60
        )
        text = ""
        for chunk in chunks:
            time.sleep(0.005)
            text += chunk.choices[0].text
        assert text == f"[{prompt}]"[:64]
        return text

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert len(set(pool.map(read, range(32)))) == 32


# All that str.splitlines() takes for the end of a line, but for LF and CR.
LINE_ENDS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_no_client_finds_other_line_ends(
    server: RunningServer, openai_client: OpenAI, path: str
) -> None:
    """O-70: lines split as Unicode does are those of the stream; the text arrives unchanged."""
    text = (
        "".join(f"{letter}{end}" for letter, end in zip("abcdefgh", LINE_ENDS, strict=True)) + "✅"
    )
    if path == COMPLETIONS:
        given = {"prompt": text, "echo": True, "max_tokens": 8}
    else:
        given = {"messages": [{"role": "user", "content": text}], "max_tokens": 64}
    response = server.post(path, {**given, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.content.decode().splitlines() == response.content.decode().split("\n")[:-1]
    chunks = parse_events(response.content)[:-1]
    whole = server.post(path, given).json()["choices"][0]
    expected = whole["text"] if path == COMPLETIONS else whole["message"]["content"]
    assert text_of(chunks) == expected
    assert text in expected or path == CHAT
    if path == COMPLETIONS:
        read = openai_client.completions.create(
            model=MODEL_NAME, prompt=text, echo=True, max_tokens=8, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in read) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_tokenized_once(server, monkeypatch, stream):
    encoded = []
    tokenizer = server.engine.tokenizer
    encode = tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **options: encoded.append(text) or encode(text, **options)
    )
    body = {"model": "scripted", "prompt": "only once", "max_tokens": 3, "stream": stream}
    assert server.post("/v1/completions", body).status_code == 200
    assert encoded.count("only once") == 1
