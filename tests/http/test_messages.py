"""Messages as clients send them: with hints, and with all that answers of servers had."""

from typing import Any

import pytest

from tests.http.conftest import RunningServer
from tests.http.test_refusals import assert_nothing_was_started, assert_refused

CHAT = "/v1/chat/completions"
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "again"},
]


def prompt_ids(server: RunningServer, messages: list[dict[str, Any]]) -> list[int]:
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    return response.json()["prompt_token_ids"]


NOTHING: list[Any] = [None, "", [], {}, {"refusal": None, "citations": []}]
NO_CONTENT: list[dict[str, Any]] = [
    *(
        {name: value}
        for name in (
            *("tool_calls", "tool_call_id", "function_call", "refusal", "audio", "images"),
            *("annotations", "reasoning", "reasoning_content", "reasoning_details", "thinking"),
            *("thinking_blocks", "provider_specific_fields", "parsed", "metadata"),
        )
        for value in NOTHING
    ),
    *({name: False} for name in ("prefix", "partial")),
    *({"id": value} for value in ("msg-1", 5)),
    {"metadata": {"row": "7"}},
    {"name": ""},
    # What vLLM and litellm return.
    {
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": None,
        "reasoning_content": None,
    },
    {"tool_calls": None, "function_call": None, "provider_specific_fields": {"refusal": None}},
]


def test_fields_without_content_change_nothing(server: RunningServer) -> None:
    """O-68"""
    expected = prompt_ids(server, TURNS)
    for extra in NO_CONTENT:
        assert prompt_ids(server, [TURNS[0], TURNS[1] | extra, TURNS[2]]) == expected, extra


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "extra",
    [
        {"reasoning_content": "because"},
        {"reasoning": "because"},
        {"tool_calls": [{}]},
        {"provider_specific_fields": {"citations": ["a"]}},
        {"images": [{"type": "image_url"}]},
        {"prefix": True},
        {"prefix": 0},
        {"annotations": [None]},
        {"refusal": False},
        {"mood": ""},
    ],
)
def test_fields_with_content_are_refused(
    server: RunningServer, extra: dict[str, Any], stream: bool
) -> None:
    """O-68: by the place of the field, whatever it is."""
    body = {"messages": [TURNS[0], TURNS[1] | extra, TURNS[2]], "stream": stream}
    assert_refused(server.post(CHAT, body), 400, f"messages[1].{next(iter(extra))}")
    assert_nothing_was_started(server)


def test_answers_of_the_server_can_be_sent_back(server: RunningServer) -> None:
    """O-68"""
    answer = server.post(CHAT, {"messages": TURNS[:1]}).json()["choices"][0]["message"]
    ids = prompt_ids(server, [TURNS[0], answer, TURNS[2]])
    assert ids == prompt_ids(
        server, [TURNS[0], {**TURNS[1], "content": answer["content"]}, TURNS[2]]
    )


@pytest.mark.parametrize("hint", [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None])
@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize("marked", [0, 2])
def test_hints_about_caching_change_nothing(
    server: RunningServer, hint: Any, role: str, marked: int
) -> None:
    """O-69"""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in "abc"]
    plain = {"role": role, "content": [dict(part) for part in parts]}
    parts[marked] |= {"cache_control": hint, "citations": None, "annotations": []}
    assert prompt_ids(server, [{"role": role, "content": parts}]) == prompt_ids(server, [plain])


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "text", "text": "hi", "colour": "red"}, ".colour"),
        ({"colour": "red", "type": "text", "text": "hi"}, ".colour"),
        ({"type": "text", "text": "hi", "citations": [{"url": "x"}]}, ".citations"),
        ({"image_url": {"url": "x"}, "type": "image_url"}, ".type"),
        ({"text": "hi"}, ".type"),
        ({"type": 5, "text": "hi"}, ".type"),
        ({"type": "text", "text": None}, ".text"),
        ("hi", ""),
        (None, ""),
    ],
)
def test_parts_that_are_refused(server: RunningServer, part: Any, param: str) -> None:
    """O-69: what is unknown or not supported is named by its place."""
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]}
    assert_refused(server.post(CHAT, body), 400, f"messages[0].content[1]{param}")
    assert_nothing_was_started(server)


def test_developer_messages_are_system_messages(server: RunningServer) -> None:
    """O-64: for a template that does not know them; as text or as parts."""
    for content in ("Be kind.", [{"type": "text", "text": "Be kind."}]):
        developer, system = ({"role": role, "content": content} for role in ("developer", "system"))
        assert prompt_ids(server, [developer, TURNS[0]]) == prompt_ids(server, [system, TURNS[0]])
        both = [system, developer, TURNS[0]]
        assert prompt_ids(server, both) == prompt_ids(server, [system, system, TURNS[0]])
