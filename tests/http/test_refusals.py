"""Every parameter is honoured or refused by name, before anything is generated."""

import json
import time
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from jpaged.server.convert import completion_params
from jpaged.server.protocol import CompletionRequest
from tests.http.conftest import RunningServer
from tests.http.scripted_engine import MAX_MODEL_LEN, MODEL_NAME

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def assert_refused(response: Any, status: int, param: str | None) -> None:
    """O-21, O-34: OpenAI's form of errors, in strict JSON."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = json.loads(response.content, parse_constant=refuse_constant)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param, error
    if param is not None:
        assert param.split("[")[0] in error["message"]


def assert_nothing_was_started(server: RunningServer) -> None:
    assert server.engine.num_started == 0
    assert server.post(COMPLETIONS, {"prompt": "ok"}).json()["choices"][0]["text"] == "[ok]"


# O-34: mistakes in the body as a whole.
BODIES: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"not json", None),
    (b"[]", None),
    (b'"text"', None),
    (b"{}", "prompt"),
    (b'{"prompt": null}', "prompt"),
    (b'{"prompt": "a"', None),
    (b'{"prompt": "\\ud800"}', None),
    (b'{"prompt": "\xff"}', None),
    (b"[" * 100_000, None),
    (b'{"prompt": "a", "unheard_of": 1}', "unheard_of"),
    (b'{"prompt": "a", "messages": []}', "messages"),
]


@pytest.mark.parametrize(("body", "param"), BODIES)
def test_bad_bodies(server: RunningServer, body: bytes, param: str | None) -> None:
    """O-34"""
    with server.client() as client:
        assert_refused(client.post(COMPLETIONS, content=body, headers=JSON), 400, param)
    assert_nothing_was_started(server)


# O-21: raw JSON, as json= would refuse to send NaN.
BAD_NUMBERS = [
    *(
        (name, value)
        for name in ("temperature", "top_p")
        for value in ("NaN", "Infinity", "-Infinity", "1e999", '"nan"', '"inf"', "true", '"1"')
    ),
    *(
        (name, value)
        for name in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for value in ("NaN", "1e999", '"inf"', "true", "2.1")
    ),
    *(("temperature", value) for value in ("-1", "2.1", "[]", "{}")),
    *(("top_p", value) for value in ("1.1", "-0.1", "0")),
    *(("top_k", value) for value in ("-2", "1.5", "true", '"5"', "NaN")),
    *(("max_tokens", value) for value in ("-1", "0", "1.0", "1e3", "true", '"5"', "NaN")),
    *(("seed", value) for value in ("1.5", "true", '"5"', "1e999", str(2**63), "9" * 4000)),
    *(("n", value) for value in ("0", "-1", "129", "true", "1.0", "1000000", '"1"', "NaN")),
    *(("best_of", value) for value in ("0", "-1", "129", "true", '"1"')),
    *(
        (name, value)
        for name in ("logprobs", "prompt_logprobs")
        for value in ("-1", "21", "1.0", "true", "false", '"1"', "NaN")
    ),
    *(("stop_token_ids", value) for value in ("5", "[1.5]", "[true]", '["a"]', "[-1]", "[NaN]")),
    *(
        (name, value)
        for name in ("stream", "ignore_eos", "skip_special_tokens", "return_token_ids", "echo")
        for value in ("1", "0", '"true"', "[]", "NaN")
    ),
]


@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_numbers_of_the_wrong_type_or_range(server: RunningServer, name: str, value: str) -> None:
    """O-21: refused by name, in strict JSON, never a 500 and never coerced."""
    body = f'{{"prompt": "a", "{name}": {value}}}'.encode()
    with server.client() as client:
        assert_refused(client.post(COMPLETIONS, content=body, headers=JSON), 400, name)
    assert_nothing_was_started(server)


# O-37; the last one: a mix of kinds.
BAD_PROMPTS: list[Any] = [
    *([], "", [""], [[]], [999_999], [-1], [1.5], [True], 5, True, {"text": "a"}),
    *(["a", 1], [1, "a"], [[1], "a"], ["a", None], ["a", ""], [[1], []], [[1], [True]]),
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
def test_bad_prompts(server: RunningServer, prompt: Any) -> None:
    """O-35, O-37"""
    assert_refused(server.post(COMPLETIONS, {"prompt": prompt}), 400, "prompt")
    assert_nothing_was_started(server)


@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_prompt_refuses_the_whole_request(server: RunningServer, stream: bool) -> None:
    """O-35: no answer for the others either, and nothing generated."""
    body = {"prompt": ["short", "long" * MAX_MODEL_LEN, "short"], "stream": stream}
    assert_refused(server.post(COMPLETIONS, body), 400, "prompt")
    assert_nothing_was_started(server)


def test_context_limit(server: RunningServer) -> None:
    """O-10: one token may follow a prompt that leaves room for one, and no more."""
    fitting = {"prompt": "x" * (MAX_MODEL_LEN - 1), "max_tokens": 1}
    answer = server.post(COMPLETIONS, fitting).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    for given, param in [
        ({"max_tokens": 5}, "max_tokens"),
        ({"prompt": "x" * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": "x" * (MAX_MODEL_LEN + 1)}, "prompt"),
    ]:
        response = server.post(COMPLETIONS, {**fitting, **given})
        assert_refused(response, 400, param)
        assert str(MAX_MODEL_LEN) in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "context_length_exceeded"


# Name, values that ask for nothing and are taken, values that ask for something.
NOT_OFFERED: list[tuple[str, list[Any], list[Any]]] = [
    ("presence_penalty", [0, 0.0], [0.5, False]),
    ("frequency_penalty", [0], [-0.5]),
    ("logit_bias", [{}], [{"5": 1}]),
    ("store", [False], [True, 0, "false"]),
    ("service_tier", ["auto", "default"], ["priority", "flex"]),
    ("min_p", [0], [0.1]),
    ("repetition_penalty", [1, 1.0], [1.1]),
    ("min_tokens", [0], [1]),
    ("bad_words", [[]], [["a"]]),
    ("allowed_token_ids", [[]], [[1]]),
    ("response_format", [{"type": "text"}], [{"type": "json_object"}]),
    ("structured_outputs", [{}, {"regex": None}], [{"regex": "a"}]),
    ("priority", [0], [1]),
    ("truncate_prompt_tokens", [], [5]),
    ("request_id", [""], ["mine"]),
]
COMPLETIONS_ONLY = [
    ("suffix", [""], ["a"]),
]
CHAT_ONLY = [
    ("tools", [[]], [[{"type": "function"}]]),
    ("tool_choice", ["none", "auto"], ["required", {"type": "function"}]),
    ("parallel_tool_calls", [True, False], ["yes"]),
    ("functions", [[]], [[{}]]),
    ("modalities", [["text"]], [["text", "audio"]]),
    ("audio", [{}], [{"voice": "a"}]),
    ("prediction", [{}], [{"type": "content", "content": "a"}]),
    ("reasoning_effort", ["none"], ["low", "high"]),
    ("verbosity", ["medium"], ["low"]),
    ("chat_template", [""], ["{{ messages }}"]),
    ("continue_final_message", [False], [True]),
    ("web_search_options", [{}], [{"search_context_size": "low"}]),
    ("best_of", [1], [2]),
    ("echo", [False], [True]),
]


@pytest.mark.parametrize(
    ("path", "name", "accepted", "refused"),
    [
        *((COMPLETIONS, *case) for case in NOT_OFFERED + COMPLETIONS_ONLY),
        *((CHAT, *case) for case in NOT_OFFERED + CHAT_ONLY),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    server: RunningServer, path: str, name: str, accepted: list[Any], refused: list[Any]
) -> None:
    """O-67: never ignored; the values that ask for nothing, and null, change nothing."""
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    for value in refused:
        response = server.post(path, {**prompt, name: value})
        assert_refused(response, 400, name)
        assert response.json()["error"]["code"] == "unsupported_parameter"
    assert server.engine.num_started == 0
    for value in [None, *accepted]:
        assert server.post(path, {**prompt, name: value}).status_code == 200, value


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_bad_options_of_chats(server: RunningServer, given: dict[str, Any], param: str) -> None:
    """O-23"""
    assert_refused(server.post(CHAT, {"messages": MESSAGES, **given}), 400, param)
    assert_nothing_was_started(server)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 1000, "n": 2}, "n"),
        ({"prompt": ["a"] * 9, "best_of": 128}, "best_of"),
    ],
)
def test_too_many_answers(server: RunningServer, given: dict[str, Any], param: str) -> None:
    """O-57, the last two: a small body that asks for a lot."""
    assert_refused(server.post(COMPLETIONS, {"prompt": "a", **given}), 400, param)
    assert_nothing_was_started(server)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_defaults_and_labels_are_accepted(server: RunningServer, path: str, stream: bool) -> None:
    """O-67: all that SDKs send along, at once; the answer is the same."""
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    extras = {
        "metadata": {"a": "b"},
        "safety_identifier": "someone",
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "store": False,
        "service_tier": "auto",
        "stop": "",
        "stop_token_ids": [],
        "n": 1,
        "best_of": 1,
        "seed": None,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "presence_penalty": 0.0,
    }
    body = {**prompt, "return_token_ids": True, "stream": stream, "temperature": 0}
    plain, labelled = (server.post(path, {**body, **more}) for more in ({}, extras))
    assert labelled.status_code == 200, labelled.text
    assert tokens_of(labelled) == tokens_of(plain)


def tokens_of(response: httpx.Response) -> list[int]:
    lines = response.text.replace("data: ", "").replace("[DONE]", "").split("\n\n")
    chunks = [json.loads(line) for line in lines if line]
    return sum((choice.get("token_ids", []) for c in chunks for choice in c["choices"]), [])


def test_seed_minus_1_is_no_seed() -> None:
    """O-74: so beam search, which takes no seed, takes it too."""
    for given in ({}, {"use_beam_search": True, "n": 2}):
        request = CompletionRequest.model_validate({"prompt": "a", "seed": -1, **given})
        params = completion_params(request, {}, has_text=True)
        assert getattr(params, "seed", None) is None


def test_user_is_accepted(server: RunningServer) -> None:
    assert server.post(COMPLETIONS, {"prompt": "a", "user": "someone"}).status_code == 200
    assert_refused(server.post(COMPLETIONS, {"prompt": "a", "user": 5}), 400, "user")


# O-34, and the members of messages.
BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    (None, "messages"),
    ("hi", "messages"),
    ({"role": "user", "content": "hi"}, "messages"),
    (["hi"], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"content": "hi"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "pirate", "content": "hi"}], "messages[0].role"),
    ([*MESSAGES, {"role": "user", "content": "hi", "mood": 1}], "messages[1].mood"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
    (
        [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}],
        "messages[0].tool_calls",
    ),
    (MESSAGES * 2049, "messages"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_MESSAGES)
def test_bad_messages(server: RunningServer, messages: Any, param: str) -> None:
    """O-34"""
    assert_refused(server.post(CHAT, {"messages": messages}), 400, param)
    assert_nothing_was_started(server)


def test_limits_that_contradict_each_other(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 6}
    assert_refused(server.post(CHAT, body), 400, "max_completion_tokens")


def test_stream_options_need_a_stream(server: RunningServer) -> None:
    """O-38"""
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    assert_refused(server.post(COMPLETIONS, body), 400, "stream_options")
    for options, param in [
        ({"include_usage": 1}, "stream_options.include_usage"),
        ({"continuous_usage_stats": True}, "stream_options.continuous_usage_stats"),
        (True, "stream_options"),
    ]:
        body = {"prompt": "a", "stream": True, "stream_options": options}
        assert_refused(server.post(COMPLETIONS, body), 400, param)


@pytest.mark.parametrize("stop", [[""], ["x", ""], [5], [None], 5, {"a": 1}, True, ["x"] * 17])
def test_bad_stop_strings(server: RunningServer, stop: Any) -> None:
    """O-28"""
    assert_refused(server.post(COMPLETIONS, {"prompt": "a", "stop": stop}), 400, "stop")
    assert_nothing_was_started(server)


@pytest.mark.parametrize("stop", [None, [], ""])
def test_no_stop_strings(server: RunningServer, stop: Any) -> None:
    """O-28, O-67: an empty text stands for none, as user interfaces send it."""
    assert server.post(COMPLETIONS, {"prompt": "a", "stop": stop}).status_code == 200


PARTS = [{"type": "text", "text": "a"}]

# O-57; a body of megabytes, each.
HUGE: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 500_000}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": [0] * 500_000}, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": "x" * 10**6}, "stop"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(50_000)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["x"] * 50_000}, "bad_words"),
    (COMPLETIONS, {"prompt": ["a"] * 10_000}, "prompt"),
    (COMPLETIONS, {"prompt": [[1]] * 500_000}, "prompt"),
    (COMPLETIONS, {"prompt": [1] * 3_000_000}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**12}, "max_tokens"),
    (CHAT, {"messages": [{"unheard_of": 1}] * 500_000}, "messages[0].unheard_of"),
    (CHAT, {"messages": [{"role": "user", "content": PARTS * 200_000}] * 2}, "messages"),
    (CHAT, {"messages": MESSAGES, **{f"x{i}": 1 for i in range(500_000)}}, "x0"),
]


@pytest.mark.parametrize(("path", "body", "param"), HUGE)
def test_huge_bodies_are_refused_quickly(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    """O-57: nothing proportional to the size but reading it."""
    content = json.dumps(body).encode()
    with server.client() as client:
        started = time.process_time()  # of the processor, however busy the machine is
        response = client.post(path, content=content, headers=JSON)
        seconds = time.process_time() - started
    assert_refused(response, 400, param)
    assert len(response.content) < 2000
    assert seconds < 2, f"{seconds:.1f} s for {len(content)} bytes"
    assert_nothing_was_started(server)


def test_bodies_over_the_limit_are_not_read(server: RunningServer) -> None:
    """O-34, O-57: a declared length, and chunks without one."""
    body = b'{"prompt": "' + b"a" * (20 * 2**20) + b'"}'
    with server.client() as client:
        assert_refused(client.post(COMPLETIONS, content=body, headers=JSON), 413, None)
        parts = (body[start : start + 2**20] for start in range(0, len(body), 2**20))
        assert_refused(client.post(COMPLETIONS, content=parts, headers=JSON), 413, None)
    assert_nothing_was_started(server)


def test_forms_are_refused(server: RunningServer) -> None:
    with server.client() as client:
        assert_refused(client.post(COMPLETIONS, data={"prompt": "a"}), 415, None)
        # As a page of another site may post it without asking first.
        assert_refused(client.post(COMPLETIONS, content=b'{"prompt": "a"}'), 415, None)


def test_the_openai_package_raises_its_own_classes(openai_client: OpenAI) -> None:
    """O-34"""
    with pytest.raises(openai.NotFoundError, match=MODEL_NAME) as raised:
        openai_client.completions.create(model="other", prompt="a")
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="not supported yet") as refused:
        openai_client.completions.create(model=MODEL_NAME, prompt="a", suffix="b")
    assert refused.value.param == "suffix"


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    """O-34"""
    with server.client() as client:
        for path in ("/", "/v1", "/v1/embeddings", "/v1/completions/", "/docs", "/openapi.json"):
            assert_refused(client.get(path), 404, None)
        for method, path in [("GET", COMPLETIONS), ("PUT", CHAT), ("POST", "/health")]:
            assert_refused(client.request(method, path), 405, None)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"beam_width": 2}, "beam_width"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "beam_width": 0}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 17}, "beam_width"),
        ({"use_beam_search": True, "beam_width": 2, "n": 3}, "n"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "n": 2, "top_p": 0.7}, "top_p"),
        ({"use_beam_search": True, "n": 2, "seed": 1}, "seed"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
    ],
)
def test_beam_search_and_sampling_do_not_mix(
    server: RunningServer, path: str, given: dict[str, Any], param: str
) -> None:
    """What would have no effect is refused, in both directions."""
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    assert_refused(server.post(path, {**prompt, **given}), 400, param)
    assert_nothing_was_started(server)
