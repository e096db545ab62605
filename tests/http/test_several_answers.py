"""n and best_of over HTTP: as many choices, each its own, streamed and not."""

from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jpaged.generation import Generation
from jpaged.outputs import RequestOutput
from tests.http.conftest import RunningServer
from tests.http.scripted_engine import MODEL_NAME
from tests.http.sse import DONE, parse_events
from tests.http.test_streaming import stream, text_of

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPTS = {"a": ["[a]", "[a]1", "[a]2"], "bcd": ["[bcd]", "[bcd]1", "[bcd]2"]}
ALL_TEXTS = sum(PROMPTS.values(), [])
CHAT_TEXTS = [f"[<user>hi\n<assistant>]{number}" for number in ("", 1, 2)]


def choices_of(chunks: list[Any], index: int) -> list[Any]:
    """Of one index; every chunk has one choice."""
    return [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]


def test_completions(server: RunningServer) -> None:
    """O-11, O-35, O-38: index = prompt * n + answer; a prompt counts once in the usage."""
    body = {"prompt": list(PROMPTS), "n": 3, "return_token_ids": True}
    answer = server.post(COMPLETIONS, body).json()
    completion = Completion.model_validate(answer, strict=True)
    assert [choice.text for choice in completion.choices] == ALL_TEXTS
    assert [choice.index for choice in completion.choices] == list(range(6))
    assert {choice.finish_reason for choice in completion.choices} == {"stop"}
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [tokenizer.encode("a")] * 3 + [tokenizer.encode("bcd")] * 3
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 1 + 3
    num_tokens = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert completion.usage.completion_tokens == num_tokens == len("".join(ALL_TEXTS)) + 6


def test_chat(server: RunningServer) -> None:
    """O-11"""
    body = {"messages": MESSAGES, "n": 3}
    completion = ChatCompletion.model_validate(server.post(CHAT, body).json(), strict=True)
    assert [choice.message.content for choice in completion.choices] == CHAT_TEXTS
    assert [choice.index for choice in completion.choices] == [0, 1, 2]


# A normal end, by length and by a stop string; snapshots with one token and with several.
@pytest.mark.parametrize("given", [{}, {"max_tokens": 3}, {"max_tokens": 1}, {"stop": "]"}])
@pytest.mark.parametrize("tokens_per_snapshot", [1, 4, 100])
def test_streams_of_completions(
    server: RunningServer, given: dict[str, Any], tokens_per_snapshot: int
) -> None:
    """O-11, O-38, O-39: each choice ends once, and nothing of it comes later."""
    server.engine.tokens_per_snapshot = tokens_per_snapshot
    body = {"prompt": list(PROMPTS), "n": 3, "return_token_ids": True, **given}
    options = {"stream_options": {"include_usage": True}}
    *chunks, usage_chunk, last = stream(server, COMPLETIONS, body | options)
    assert last == DONE
    whole = server.post(COMPLETIONS, body).json()
    assert len(whole["choices"]) == 6
    for index, expected in enumerate(whole["choices"]):
        own = choices_of(chunks, index)
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons == [None] * (len(own) - 1) + [expected["finish_reason"]]
        assert text_of(chunks, index) == expected["text"]
        assert sum((choice["token_ids"] for choice in own), []) == expected["token_ids"]
        prompts = [choice.get("prompt_token_ids") for choice in own]
        assert prompts == [expected["prompt_token_ids"]] + [None] * (len(own) - 1)
    assert usage_chunk["choices"] == []
    assert usage_chunk["usage"] == whole["usage"]


@pytest.mark.parametrize("given", [{}, {"max_tokens": 1}, {"stop_token_ids": [58]}])
@pytest.mark.parametrize("tokens_per_snapshot", [1, 100])
def test_streams_of_chats(
    server: RunningServer, given: dict[str, Any], tokens_per_snapshot: int
) -> None:
    """O-38, O-39: the role is in the first chunk of each choice and in no other."""
    server.engine.tokens_per_snapshot = tokens_per_snapshot
    body = {"messages": MESSAGES, "n": 3, **given}
    options = {"stream_options": {"include_usage": True}}
    *chunks, usage_chunk, last = stream(server, CHAT, body | options)
    assert last == DONE
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    whole = server.post(CHAT, body).json()
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    for index, expected in enumerate(whole["choices"]):
        own = choices_of(chunks, index)
        roles = [choice["delta"].get("role") for choice in own]
        assert roles == ["assistant"] + [None] * (len(own) - 1)
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons == [None] * (len(own) - 1) + [expected["finish_reason"]]
        assert text_of(chunks, index) == expected["message"]["content"]
    assert usage_chunk["usage"] == whole["usage"]


def test_choices_are_streamed_side_by_side(server: RunningServer) -> None:
    chunks = stream(server, CHAT, {"messages": MESSAGES, "n": 3})[:-1]
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order), "one after the other"
    # The last one starts late: nothing of it is sent before.
    assert order.index(2) > order.index(1) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_best_of_as_many_as_n(server: RunningServer, stream: bool) -> None:
    body = {"prompt": "a", "n": 3, "best_of": 3, "stream": stream}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 200
    assert stream or [choice["text"] for choice in response.json()["choices"]] == PROMPTS["a"]


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_returns_the_likeliest(server: RunningServer, logprobs: int | None) -> None:
    """The script makes later answers likelier. Only what is returned counts in the usage."""
    body = {"prompt": list(PROMPTS), "n": 2, "best_of": 3, "logprobs": logprobs}
    answer = server.post(COMPLETIONS, body).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["[a]2", "[a]1", "[bcd]2", "[bcd]1"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == len("".join(texts)) + 4


def test_the_openai_package_reads_many_choices(openai_client: OpenAI) -> None:
    chunks = openai_client.completions.create(model=MODEL_NAME, prompt="x", n=128, stream=True)
    texts = [""] * 128
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["[x]"] + [f"[x]{number}" for number in range(1, 128)]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("stop", ["</s>", "</s>[a"])
@pytest.mark.parametrize("tokens_per_snapshot", [1, 4])
def test_special_tokens_in_stop_strings(
    server: RunningServer,
    stop: str,
    include: bool,
    skip_special_tokens: bool,
    tokens_per_snapshot: int,
) -> None:
    """O-73: they end each answer, whether the text shows special tokens or not."""
    server.engine.tokens_per_snapshot = tokens_per_snapshot
    body = {
        **{"prompt": "ab", "n": 2, "ignore_eos": True, "stop": [stop], "max_tokens": 40},
        "skip_special_tokens": skip_special_tokens,
        "include_stop_str_in_output": include,
    }
    chunks = stream(server, COMPLETIONS, body)[:-1]
    choices = server.post(COMPLETIONS, body).json()["choices"]
    for choice, text in zip(choices, ("[ab]", "[ab]1"), strict=True):
        expected = text + (stop if include else "")
        assert choice["text"] == text_of(chunks, choice["index"]) == expected
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        last = choices_of(chunks, choice["index"])[-1]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


@pytest.mark.parametrize("stream", [False, True])
def test_fewer_answers_than_asked_for(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A beam search may end so; choices of the next prompt keep their indices."""
    complete = Generation.output

    def without_last(generation: Generation) -> RequestOutput:
        output = complete(generation)
        return replace(output, outputs=output.outputs[:2])

    monkeypatch.setattr(Generation, "output", without_last)
    response = server.post(COMPLETIONS, {"prompt": list(PROMPTS), "n": 3, "stream": stream})
    if stream:
        chunks = parse_events(response.content)[:-1]
        texts = {index: text_of(chunks, index) for index in range(6)}
    else:
        choices = response.json()["choices"]
        texts = {choice["index"]: choice["text"] for choice in choices}
    expected = {0: "[a]", 1: "[a]1", 3: "[bcd]", 4: "[bcd]1"}
    assert {index: text for index, text in texts.items() if text} == expected
