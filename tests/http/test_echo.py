"""Prompts in front of their answers, and the log-probabilities of prompts' tokens."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion
from tokenizers import Tokenizer as PlainTokenizer
from tokenizers import normalizers

from jpaged.errors import RequestError
from jpaged.outputs import TokenLogprobs
from jpaged.server.convert import chat_params, completion_params
from jpaged.server.deltas import GivenPrompt
from jpaged.server.echo import Echo
from jpaged.server.logprob_limit import check_num_logprobs
from jpaged.server.protocol import ChatCompletionRequest, CompletionRequest
from jpaged.text.token_text import token_text
from jpaged.text.tokenizer import Tokenizer
from tests.doubles import (
    BOS,
    byte_level_tokenizer,
    byte_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
)
from tests.http.conftest import RunningServer
from tests.http.scripted_engine import MODEL_NAME
from tests.http.sse import DONE
from tests.http.test_logprobs import LEAST, numbers_of, without_tokenizer
from tests.http.test_refusals import assert_nothing_was_started, assert_refused, refuse_constant
from tests.http.test_several_answers import PROMPTS, choices_of
from tests.http.test_streaming import stream, text_of

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def tokenizer_of(server: RunningServer) -> Tokenizer:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("prompt", ["a lot", "é 漢字, naïve"])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
def test_scoring(openai_client: OpenAI, prompt: str, max_tokens: int) -> None:
    """O-25: an entry for each token of prompt and answer; texts are where the offsets say."""
    completion = openai_client.completions.create(
        model=MODEL_NAME, prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens
    )
    (choice,) = completion.choices
    num_prompt_tokens = len(prompt.encode())
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == num_prompt_tokens
    assert completion.usage.completion_tokens == max_tokens
    assert choice.finish_reason == "length"
    answer = f"[{prompt}]".encode()[:max_tokens].decode(errors="replace")
    assert choice.text == prompt + answer
    assert choice.logprobs is not None
    lists = [getattr(choice.logprobs, name) for name in LISTS]
    assert {len(values) for values in lists} == {num_prompt_tokens + max_tokens}
    # The script: token i of the prompt has rank i % 4, and so has token i of the answer.
    own = [None, *(-(1 + i % 4) / 2 for i in range(1, num_prompt_tokens))]
    assert lists[1] == own + [-(1 + i % 4) / 2 for i in range(max_tokens)]
    assert lists[2][0] is None
    for token, logprob, top, offset in zip(*lists, strict=True):
        assert top is None or top[token] == logprob
        assert "\ufffd" in token or choice.text[offset:].startswith(token)
    assert "\ufffd" in lists[0] or "".join(lists[0]) == choice.text


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("given", [{}, {"stop": "é"}, {"max_tokens": 1}, {"max_tokens": 0}])
@pytest.mark.parametrize("tokens_per_snapshot", [1, 4])
def test_streams(
    server: RunningServer, given: dict[str, Any], logprobs: int | None, tokens_per_snapshot: int
) -> None:
    """O-25, O-38, O-39, R6: the prompt is in the first chunk; joined, the offsets go on."""
    server.engine.tokens_per_snapshot = tokens_per_snapshot
    num_answers = 1 if "max_tokens" in given else 3
    prompts = ["é c", "b"]
    body = {"prompt": prompts, "n": num_answers, "echo": True, "logprobs": logprobs, **given}
    options = {"stream_options": {"include_usage": True}}
    *chunks, usage_chunk, last = stream(server, COMPLETIONS, body | options)
    assert last == DONE
    whole = server.post(COMPLETIONS, body).json()
    assert usage_chunk["usage"] == whole["usage"]
    assert len(whole["choices"]) == 2 * num_answers
    for index, expected in enumerate(whole["choices"]):
        own = choices_of(chunks, index)
        assert own[0]["text"].startswith(prompts[index // num_answers])
        assert text_of(chunks, index) == expected["text"]
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons == [None] * (len(own) - 1) + [expected["finish_reason"]]
        if logprobs is None:
            assert {choice["logprobs"] for choice in [*own, expected]} == {None}
            continue
        for name in LISTS:
            joined = sum((choice["logprobs"][name] for choice in own), [])
            assert joined == expected["logprobs"][name]


def test_each_choice_has_its_own_prompt(server: RunningServer) -> None:
    """O-25, O-35: and usage, token ids and stop strings are those of the answers alone."""
    body = {"prompt": list(PROMPTS), "n": 3, "return_token_ids": True, "stop": "d"}
    echoed = server.post(COMPLETIONS, {**body, "echo": True}).json()
    plain = server.post(COMPLETIONS, body).json()
    assert echoed["usage"] == plain["usage"]
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    for prompt, with_echo, without in zip(
        prompts, echoed["choices"], plain["choices"], strict=True
    ):
        assert with_echo == {**without, "text": prompt + without["text"]}


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_alone(server: RunningServer, stream: bool) -> None:
    """O-25: without log-probabilities too, and as long as the context."""
    prompt = "x" * server.engine.max_model_len
    body = {"prompt": ["a", prompt], "echo": True, "max_tokens": 0, "stream": stream}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    assert server.engine.num_generated == 0
    if not stream:
        choices = Completion.model_validate(response.json(), strict=True).choices
        assert [choice.text for choice in choices] == ["a", prompt]
        assert {choice.finish_reason for choice in choices} == {"length"}
        assert {choice.logprobs for choice in choices} == {None}


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_prompts_of_token_ids(server: RunningServer, skip_special_tokens: bool) -> None:
    """Their text is echoed as that of answers would be; a text stays as it was sent."""
    text = "a</s>é"
    token_ids = tokenizer_of(server).encode(text)
    options = {"skip_special_tokens": skip_special_tokens, "max_tokens": 0, "logprobs": 0}
    body = {"prompt": [token_ids], "echo": True, **options}
    (choice,) = server.post(COMPLETIONS, body).json()["choices"]
    assert choice["text"] == ("aé" if skip_special_tokens else text)
    shown = 1 if skip_special_tokens else 5
    assert choice["logprobs"]["text_offset"] == [0, 1, shown, shown]
    (choice,) = server.post(COMPLETIONS, {**body, "prompt": text}).json()["choices"]
    assert choice["text"] == text
    assert choice["logprobs"]["text_offset"] == [0, 1, 5, 5]
    assert choice["logprobs"]["tokens"] == ["a", "</s>", "\ufffd", "\ufffd"]


def test_echo_without_a_tokenizer(server: RunningServer) -> None:
    """skip_tokenizer_init: tokens are named by their ids, and there is no text."""
    body = {"echo": True, "logprobs": 0, "max_tokens": 1, "prompt_logprobs": 0}
    with without_tokenizer(server) as tokenizer:
        token_ids = tokenizer.encode("ab")
        (choice,) = server.post(COMPLETIONS, {**body, "prompt": token_ids}).json()["choices"]
    assert choice["text"] == ""
    names = [f"token_id:{token_id}" for token_id in tokenizer.encode("ab[")]
    assert choice["logprobs"]["tokens"] == names
    assert choice["logprobs"]["text_offset"] == [0, 0, 0]
    assert choice["prompt_logprobs"][1][str(token_ids[1])]["decoded_token"] == names[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "max_tokens"),
        ({"logprobs": 1}, "max_tokens"),
        ({"echo": True, "n": 2}, "max_tokens"),
        ({"echo": True, "use_beam_search": True}, "max_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True, "prompt": "x" * 600}, "prompt"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_max_tokens_0_is_refused(
    server: RunningServer, given: dict[str, Any], param: str, stream: bool
) -> None:
    """O-25: without an echo or with several answers; never answered by a token."""
    body = {"prompt": "a", "max_tokens": 0, "stream": stream, **given}
    assert_refused(server.post(COMPLETIONS, body), 400, param)
    assert_nothing_was_started(server)


@pytest.mark.parametrize(
    "given",
    [
        {"echo": True, "logprobs": 5},
        {"echo": True, "logprobs": 5, "stream": True},
        {"prompt_logprobs": 5},
    ],
)
def test_minus_infinity(server: RunningServer, given: dict[str, Any]) -> None:
    """O-24: of prompts' tokens and of others."""
    server.engine.least_logprob = -1.2
    response = server.post(COMPLETIONS, {"prompt": "ab c", "max_tokens": 0, **given})
    assert response.status_code == 200
    first = response.text.removeprefix("data: ").split("\n\n")[0]
    answer = json.loads(first, parse_constant=refuse_constant)
    assert set(numbers_of(answer)) == {-0.5, -1.0, LEAST}


@pytest.mark.parametrize("number", [0, 2, 20])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_of_completions(
    server: RunningServer, number: int, max_tokens: int
) -> None:
    """The prompt's token first, then the likeliest ones; ranks are those among these."""
    tokenizer = tokenizer_of(server)
    prompts = ["abcde", "é"]
    body = {"prompt": prompts, "prompt_logprobs": number, "max_tokens": max_tokens}
    answer = server.post(COMPLETIONS, body).json()
    Completion.model_validate(answer, strict=True)
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        assert choice["text"] == f"[{prompt}]".encode()[:max_tokens].decode(errors="replace")
        assert choice["logprobs"] is None
        first, *entries = choice["prompt_logprobs"]
        assert first is None
        for position, (token_id, entry) in enumerate(
            zip(tokenizer.encode(prompt)[1:], entries, strict=True), start=1
        ):
            rank = position % 4 + 1
            assert next(iter(entry)) == str(token_id)
            assert entry[str(token_id)] == {
                "logprob": -rank / 2,
                "rank": rank if rank <= number else None,
                "decoded_token": token_text(tokenizer, token_id),
            }
            assert len(entry) == number + (rank > number)
            ranks = {each["rank"]: each["logprob"] for each in entry.values()}
            assert {rank: ranks[rank] for rank in range(1, number + 1)} == {
                rank: -rank / 2 for rank in range(1, number + 1)
            }


def test_prompt_logprobs_of_chats(openai_client: OpenAI, server: RunningServer) -> None:
    completion = openai_client.chat.completions.create(
        model=MODEL_NAME,
        messages=MESSAGES,  # pyright: ignore
        n=2,
        max_tokens=1,
        extra_body={"prompt_logprobs": 1},
    )
    answer = completion.model_dump()
    ChatCompletion.model_validate(answer, strict=True)
    first, *entries = answer["prompt_logprobs"]
    assert first is None
    token_ids = tokenizer_of(server).encode_chat(MESSAGES)
    assert [next(iter(entry)) for entry in entries] == [str(each) for each in token_ids[1:]]
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])
    assert "prompt_logprobs" not in server.post(CHAT, {"messages": MESSAGES}).json()


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(1, 3), (3, 1), (0, 2)])
def test_echo_and_prompt_logprobs(
    server: RunningServer, logprobs: int, prompt_logprobs: int
) -> None:
    """Each shows as many as it was asked for."""
    body = {"prompt": "abcde", "echo": True, "max_tokens": 0}
    both = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    (choice,) = server.post(COMPLETIONS, {**body, **both}).json()["choices"]
    for name, value in both.items():
        (alone,) = server.post(COMPLETIONS, {**body, name: value}).json()["choices"]
        assert alone[name] == choice[name]


def test_prompt_logprobs_are_not_streamed(server: RunningServer) -> None:
    for number in (0, 5):
        body = {"prompt": "a", "stream": True, "prompt_logprobs": number}
        response = server.post(COMPLETIONS, body)
        assert_refused(response, 400, "prompt_logprobs")
        assert "streams" in response.json()["error"]["message"]
    assert_nothing_was_started(server)


# What follows needs no server.


def load(tokenizer: PlainTokenizer, folder: Path) -> Tokenizer:
    save_tokenizer(tokenizer, folder)
    return Tokenizer.from_folder(folder)


def normalizing_tokenizer() -> PlainTokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def echoed(tokenizer: Tokenizer, text: str | None, token_ids: list[int]) -> list[tuple[str, int]]:
    """The text of each token and where it begins; checks what is echoed."""
    entry = TokenLogprobs(-1.0, ())
    logprobs = [None, *[entry] * (len(token_ids) - 1)]
    echo = Echo(tokenizer=tokenizer, skip_special_tokens=True, num_top=0)
    prompt = echo.of(GivenPrompt(text=text, token_ids=tuple(token_ids), logprobs=logprobs))
    assert prompt.text == (text or tokenizer.decode(token_ids, skip_special_tokens=True))
    assert prompt.logprobs is not None
    return list(zip(prompt.logprobs["tokens"], prompt.logprobs["text_offset"], strict=True))


@pytest.mark.parametrize("make", [byte_tokenizer, byte_level_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize(
    "text", ["hello he said hello", " he", "漢字🔥 ü漢x", "a</s>b<tag>c", "\nhe\n", "🔥"]
)
@pytest.mark.parametrize("is_text", [True, False])
def test_prompts_of_all_tokenizers(
    make: Callable[[], PlainTokenizer], text: str, is_text: bool, tmp_path: Path
) -> None:
    """O-25: also those that put a token or a space in front, which the text does not have."""
    tokenizer = load(make(), tmp_path)
    (bos,) = tokenizer.encode(BOS, add_special_tokens=False)[-1:]
    token_ids = [bos, *tokenizer.encode(text, add_special_tokens=False)]
    shown = text if is_text else tokenizer.decode(token_ids, skip_special_tokens=True)
    found = echoed(tokenizer, text if is_text else None, token_ids)
    offsets = [offset for _, offset in found]
    assert offsets == sorted(offsets)
    assert offsets[:2] == [0, 0]
    for token_id, (piece, offset) in zip(token_ids[1:], found[1:], strict=True):
        is_shown = is_text or token_id not in tokenizer.special_token_ids
        if is_shown and "\ufffd" not in piece:
            assert shown[offset:].startswith(piece)
    if is_text and text.isascii():
        assert "".join(piece for piece, _ in found[1:]) == text


def test_prompts_that_are_normalized(tmp_path: Path) -> None:
    """O-25: tokens have fewer characters than the text; all but the next one are found again."""
    tokenizer = load(normalizing_tokenizer(), tmp_path)
    text = "cafe\u0301 x, cafe\u0301 hello"
    found = echoed(tokenizer, text, tokenizer.encode(text))
    misplaced = [piece for piece, offset in found if not text[offset:].startswith(piece)]
    assert misplaced == ["é", " ", "é", " "]


CALLS = ("jpaged.server.echo.completion_logprobs", "jpaged.server.answers.prompt_logprobs")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_prompt_are_made_once(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, call: str, stream: bool
) -> None:
    """O-57: not for each of its choices, which are many."""
    if stream and call == CALLS[1]:
        return  # not in streams
    made = []
    module, name = call.rsplit(".", 1)
    original = getattr(importlib.import_module(module), name)
    monkeypatch.setattr(call, lambda *given: made.append(given) or original(*given))
    body = {"prompt": ["ab c", "d"], "n": 8, "max_tokens": 2, "stream": stream}
    fields = {"echo": True, "logprobs": 2} if call == CALLS[0] else {"prompt_logprobs": 2}
    assert server.post(COMPLETIONS, {**body, **fields}).status_code == 200
    assert len(made) == 2


def limit_of(
    given: dict[str, Any], num_prompt_tokens: list[int], *, chat: bool = False
) -> tuple[str | None, str]:
    """The field that is refused, and the message."""
    if chat:
        request = ChatCompletionRequest.model_validate({"messages": MESSAGES, **given})
        params = chat_params(request, {}, has_text=True)
    else:
        request = CompletionRequest.model_validate({"prompt": "a", **given})
        params = completion_params(request, {}, has_text=True)
    try:
        check_num_logprobs(request, num_prompt_tokens, params)
    except RequestError as error:
        return error.param, str(error)
    return None, ""


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"echo": True, "logprobs": 20, "n": 4, "max_tokens": 1}, 2**20 // (4 * 21) - 1),
        ({"prompt_logprobs": 3, "max_tokens": 0}, 2**20 // 4),
        ({"prompt_logprobs": 0, "n": 128}, 2**20 // 128),
        (
            {"echo": True, "logprobs": 1, "use_beam_search": True, "n": 4, "max_tokens": 1},
            2**17 - 1,
        ),
    ],
)
def test_log_probabilities_of_one_answer_are_limited(given: dict[str, Any], most: int) -> None:
    """O-57: prompts times choices times log-probabilities; those of answers count too."""
    name = "prompt_logprobs" if "prompt_logprobs" in given else "logprobs"
    assert limit_of(given, [most]) == (None, "")
    param, message = limit_of(given, [most + 1])
    assert param == name
    assert message.startswith(name) and str(2**20) in message
    # A list of prompts counts as one long prompt does, and each of its answers.
    assert limit_of(given, [most // 2, most // 2 + 2])[0] == name


def test_log_probabilities_of_answers_are_limited() -> None:
    """O-57: one chat may fill a long context; many answers may not."""
    chat = {"logprobs": True, "top_logprobs": 20}
    assert limit_of(chat, [100_000], chat=True)[0] is None
    assert limit_of({**chat, "n": 128}, [5], chat=True)[0] == "top_logprobs"
    assert (
        limit_of({"prompt_logprobs": 20, "n": 128, "max_tokens": 1}, [9000], chat=True)[0] is None
    )
    assert limit_of({"logprobs": 20, "n": 100, "max_tokens": 500}, [5])[0] == "logprobs"
    assert limit_of({"logprobs": 20, "n": 100, "max_tokens": 400}, [5])[0] is None


def test_too_many_log_probabilities_are_refused_before_any_work(server: RunningServer) -> None:
    """O-57"""
    for more in ({"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}):
        body = {"prompt": ["x" * 400] * 8, "n": 32, "max_tokens": 1, **more}
        name = "prompt_logprobs" if "prompt_logprobs" in more else "logprobs"
        assert_refused(server.post(COMPLETIONS, body), 400, name)
    assert_nothing_was_started(server)
