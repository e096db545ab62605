"""Answers have OpenAI's form (R5: the openai package's types accept them) and the right content."""

from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion

from jpaged.sampling_params import SamplingParams
from tests.http.conftest import RunningServer
from tests.http.scripted_engine import MAX_MODEL_LEN, MODEL_NAME

pytestmark = pytest.mark.smoke


def test_completion(server: RunningServer) -> None:
    body = server.post("/v1/completions", {"model": MODEL_NAME, "prompt": "abc"}).json()
    completion = Completion.model_validate(body, strict=True)
    (choice,) = completion.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "[abc]", "stop")
    assert completion.object == "text_completion"
    assert completion.model == MODEL_NAME
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 3
    assert completion.usage.completion_tokens == 6  # "[abc]" and end of sequence
    assert completion.usage.total_tokens == 9


def test_completions_default_to_16_tokens(server: RunningServer) -> None:
    body = {"prompt": "abc", "ignore_eos": True}
    for given in (body, {**body, "max_tokens": None}):
        answer = server.post("/v1/completions", given).json()
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"


def test_chat(server: RunningServer) -> None:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}
    completion = ChatCompletion.model_validate(
        server.post("/v1/chat/completions", body).json(), strict=True
    )
    (choice,) = completion.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "[<user>hi\n<assistant>]"
    assert (choice.index, choice.finish_reason) == (0, "stop")
    assert completion.object == "chat.completion"


def test_chat_without_max_tokens_fills_the_context(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert usage["total_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_chat_takes_both_names_of_the_limit(server: RunningServer, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], name: 3}
    assert server.post("/v1/chat/completions", body).json()["usage"]["completion_tokens"] == 3


def test_chat_template_is_told_whether_to_start_the_answer(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "[<user>hi\n]"


def test_text_parts_of_a_message_are_joined(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "[<user>a\nb\n<assistant>]"


def test_an_answer_can_be_sent_back(openai_client: OpenAI) -> None:
    first = openai_client.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "hi"}]
    )
    turns = [
        {"role": "user", "content": "hi"},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "yes"},
    ]
    second = openai_client.chat.completions.create(
        model=MODEL_NAME,
        messages=turns,  # pyright: ignore
    )
    assert "<assistant>[<user>hi" in (second.choices[0].message.content or "")


def test_choices_are_in_the_order_of_the_prompts(server: RunningServer) -> None:
    """O-35: lists of texts, lists of id lists and one flat id list."""

    def texts(prompt: object) -> list[tuple[int, str]]:
        body = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 64}).json()
        return [(choice["index"], choice["text"]) for choice in body["choices"]]

    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    words = ["a rather long prompt", "b", "cc"]
    expected = [(index, f"[{word}]") for index, word in enumerate(words)]
    assert texts(words) == expected
    assert texts([tokenizer.encode(word) for word in words]) == expected
    assert texts(tokenizer.encode("one")) == [(0, "[one]")]
    assert texts(["single"]) == [(0, "[single]")]


def test_usage_counts_all_prompts(server: RunningServer) -> None:
    usage = server.post("/v1/completions", {"prompt": ["abc", "d"], "max_tokens": 4}).json()[
        "usage"
    ]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 8)


def test_token_ids_are_returned_on_request(server: RunningServer) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    body = {"prompt": "ab", "return_token_ids": True, "max_tokens": 4}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["prompt_token_ids"] == tokenizer.encode("ab")
    assert choice["token_ids"] == tokenizer.encode("[ab]")
    plain = server.post("/v1/completions", {"prompt": "ab"}).json()
    assert "token_ids" not in plain["choices"][0]


def test_token_ids_of_chats(server: RunningServer) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "return_token_ids": True, "max_tokens": 2}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["prompt_token_ids"] == tokenizer.encode_chat(messages)
    assert answer["choices"][0]["token_ids"] == tokenizer.encode("[<")


def test_stop_strings_and_stop_tokens(server: RunningServer) -> None:
    """O-28: a bare string and a list, cut inside the answer; the reason is told."""
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    (token_id,) = tokenizer.encode("c")
    cases = [
        ({"stop": "c"}, "[ab", "c"),
        ({"stop": ["x", "bc"]}, "[a", "bc"),
        ({"stop": "c", "include_stop_str_in_output": True}, "[abc", "c"),
        ({"stop_token_ids": [token_id]}, "[ab", token_id),
    ]
    for given, text, reason in cases:
        (choice,) = server.post("/v1/completions", {"prompt": "abcd", **given}).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop"), given
        assert choice["stop_reason"] == reason


def test_special_tokens_are_shown_on_request(server: RunningServer) -> None:
    body = {"prompt": "a", "skip_special_tokens": False, "ignore_eos": True, "max_tokens": 4}
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "[a]</s>"


def test_ids_are_unique_whatever_the_client_sends(server: RunningServer) -> None:
    """O-36: a header of the client never becomes the engine's key."""
    ids = set()
    with server.client() as client:
        for value in ("same", "same", "x" * 10_000, "ü"):
            response = client.post(
                "/v1/completions",
                json={"prompt": "a"},
                headers=[("X-Request-Id", value.encode("latin-1"))],  # pyright: ignore
            )
            assert response.status_code == 200
            ids.add(response.json()["id"])
    assert len(ids) == 4


def test_models(openai_client: OpenAI) -> None:
    (model,) = openai_client.models.list().data
    assert Model.model_validate(model.model_dump()).id == MODEL_NAME
    assert model.model_dump()["max_model_len"] == MAX_MODEL_LEN


def test_stop_strings_need_a_tokenizer(server: RunningServer) -> None:
    tokenizer, server.engine.tokenizer = server.engine.tokenizer, None
    try:
        response = server.post("/v1/completions", {"prompt": [3, 4], "stop": "a"})
    finally:
        server.engine.tokenizer = tokenizer
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 0.05, "top_k": 1, "top_p": 0.9}),
        ({"temperature": None, "top_p": None}, {"temperature": 0.05, "top_k": 1, "top_p": 0.9}),
        ({"temperature": 1, "top_k": 0}, {"temperature": 1.0, "top_k": 0, "top_p": 0.9}),
        ({"temperature": 0, "top_p": 1}, {"temperature": 0.0, "top_k": 1, "top_p": 1.0}),
    ],
)
def test_sampling_is_the_models_unless_the_request_says(
    server: RunningServer, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """O-75: on both endpoints."""
    server.engine.sampling_defaults = {"temperature": 0.05, "top_k": 1, "top_p": 0.9}
    bodies = {
        "completions": {"prompt": "a"},
        "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    }
    for path, body in bodies.items():
        answer = server.post(f"/v1/{path}", {**body, "max_tokens": 2, **given})
        assert answer.status_code == 200, answer.text
        assert server.engine.last_params == SamplingParams(max_tokens=2, **expected)
