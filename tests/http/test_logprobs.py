"""Log-probabilities over HTTP, in the forms of completions and of chats."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Tokenizer as PlainTokenizer

from jpaged.text.token_bytes import token_bytes
from jpaged.text.token_text import TextOffsets, token_text
from jpaged.text.tokenizer import Tokenizer
from tests.doubles import (
    EOS,
    byte_level_tokenizer,
    byte_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
)
from tests.http.conftest import RunningServer
from tests.http.test_refusals import refuse_constant
from tests.http.test_streaming import stream

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
LEAST = -9999.0
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def numbers_of(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for member in value:
            yield from numbers_of(member)
    elif isinstance(value, float):
        yield value


@contextmanager
def without_tokenizer(server: RunningServer) -> Iterator[Tokenizer]:
    """The server as of skip_tokenizer_init."""
    tokenizer, server.engine.tokenizer = server.engine.tokenizer, None
    assert tokenizer is not None
    try:
        yield tokenizer
    finally:
        server.engine.tokenizer = tokenizer


@pytest.mark.parametrize("number", [0, 1, 5, 20])
def test_form_of_completions(server: RunningServer, number: int) -> None:
    """O-23, O-25: one entry a token in each list; texts of tokens are where the offsets say."""
    body = {"prompt": "abdc", "logprobs": number, "return_token_ids": True}
    answer = server.post(COMPLETIONS, body).json()
    Completion.model_validate(answer, strict=True)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert logprobs.keys() == {*LISTS, "bytes"}
    assert {len(values) for values in logprobs.values()} == {len(choice["token_ids"])}
    assert logprobs["tokens"] == [*"[abdc]", "</s>"]
    assert logprobs["text_offset"] == list(range(7))
    # The script: likeliest, second, third, fourth and again.
    assert logprobs["token_logprobs"] == [-0.5, -1.0, -1.5, -2.0, -0.5, -1.0, -1.5]
    for rank, (token, own, top) in enumerate(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    ):
        assert top[token] == own
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert len(top) == number + (rank % 4 >= number)


def test_tokens_of_the_same_text(server: RunningServer) -> None:
    """They have one entry, the generated token's or else the likeliest one's."""
    body = {"prompt": "é", "logprobs": 4, "max_tokens": 3}
    logprobs = server.post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["[", "\ufffd", "\ufffd"]
    for own, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert top["\ufffd"] == own


@pytest.mark.parametrize("given", [{}, {"top_logprobs": 0}, {"top_logprobs": 3}])
def test_form_of_chats(server: RunningServer, given: dict[str, Any]) -> None:
    """O-23"""
    body = {"messages": MESSAGES, "logprobs": True, "return_token_ids": True, **given}
    answer = server.post(CHAT, body).json()
    ChatCompletion.model_validate(answer, strict=True)
    (choice,) = answer["choices"]
    assert choice["logprobs"].keys() == {"content", "refusal"}
    assert choice["logprobs"]["refusal"] is None
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    assert "".join(entry["token"] for entry in entries[:-1]) == choice["message"]["content"]
    for entry in entries:
        shown = "" if entry["token"] == EOS else entry["token"]
        assert bytes(entry["bytes"]) == shown.encode()
        top = entry["top_logprobs"]
        assert len(top) == given.get("top_logprobs", 0)
        assert all(high["logprob"] > low["logprob"] for high, low in pairwise(top))
        own = [each["logprob"] for each in top if each["token"] == entry["token"]]
        assert own in ([], [entry["logprob"]])


@pytest.mark.parametrize("given", [{}, {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}])
def test_chats_without(server: RunningServer, given: dict[str, Any]) -> None:
    """O-23: what asks for nothing is accepted."""
    (choice,) = server.post(CHAT, {"messages": MESSAGES, **given}).json()["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize("given", [{}, {"max_tokens": 1}, {"stop": "c]"}, {"n": 3}])
@pytest.mark.parametrize("tokens_per_snapshot", [1, 4])
def test_streams_of_completions(
    server: RunningServer, given: dict[str, Any], tokens_per_snapshot: int
) -> None:
    """O-23, O-25: joined, they are those without streaming, though text is held back."""
    server.engine.tokens_per_snapshot = tokens_per_snapshot
    body = {"prompt": "é c", "logprobs": 2, **given}
    chunks = stream(server, COMPLETIONS, body)[:-1]
    for expected in server.post(COMPLETIONS, body).json()["choices"]:
        joined: dict[str, list[Any]] = {name: [] for name in expected["logprobs"]}
        for choice in (chunk["choices"][0] for chunk in chunks):
            if choice["index"] == expected["index"]:
                for name, values in choice["logprobs"].items():
                    joined[name] += values
        assert joined == expected["logprobs"]


@pytest.mark.parametrize("given", [{}, {"max_tokens": 1}, {"stop": "t>]"}, {"n": 3}])
@pytest.mark.parametrize("tokens_per_snapshot", [1, 4])
def test_streams_of_chats(
    server: RunningServer, given: dict[str, Any], tokens_per_snapshot: int
) -> None:
    """O-23"""
    server.engine.tokens_per_snapshot = tokens_per_snapshot
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **given}
    chunks = stream(server, CHAT, body)[:-1]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    for expected in server.post(CHAT, body).json()["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        assert own[0]["logprobs"] is None  # the chunk of the role
        entries = [choice["logprobs"]["content"] for choice in own[1:]]
        assert sum(entries, []) == expected["logprobs"]["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "ab c", "logprobs": 5},
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5},
    ],
)
def test_minus_infinity(server: RunningServer, body: dict[str, Any], stream: bool) -> None:
    """O-24: of generated tokens and of others."""
    server.engine.least_logprob = -1.2
    path = COMPLETIONS if "prompt" in body else CHAT
    response = server.post(path, {**body, "stream": stream})
    assert response.status_code == 200
    found = set()
    for line in response.text.removesuffix("data: [DONE]\n\n").split("\n\n"):
        if line:
            answer = json.loads(line.removeprefix("data: "), parse_constant=refuse_constant)
            found |= set(numbers_of(answer))
    assert found == {-0.5, -1.0, LEAST}


def test_values_do_not_depend_on_the_form(server: RunningServer) -> None:
    """O-24: completions and chats report the same of the same tokens."""
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode_chat(MESSAGES)
    legacy = server.post(COMPLETIONS, {"prompt": prompt, "logprobs": 2, "max_tokens": 9}).json()
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 9}
    entries = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    logprobs = legacy["choices"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == logprobs["tokens"]
    assert [entry["logprob"] for entry in entries] == logprobs["token_logprobs"]


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_tokenizer(server: RunningServer, stream: bool) -> None:
    """skip_tokenizer_init: tokens are named by their ids, and there is no text."""
    with without_tokenizer(server) as tokenizer:
        body = {"prompt": tokenizer.encode("ab"), "logprobs": 1, "stream": stream}
        response = server.post(COMPLETIONS, {**body, "max_tokens": 1})
    text = response.text.removeprefix("data: ").split("\n\n")[0]
    (choice,) = json.loads(text)["choices"]
    name = f"token_id:{tokenizer.encode('[')[0]}"
    assert choice["text"] == ""
    assert choice["logprobs"] == {
        "tokens": [name],
        "token_logprobs": [-0.5],
        "top_logprobs": [{name: -0.5}],
        "text_offset": [0],
        "bytes": [None],
    }


SPLIT = "🔥é"  # of several tokens a character


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_bytes_of_chats(server: RunningServer, streamed: bool, skip_special_tokens: bool) -> None:
    """O-94: joined, they are the UTF-8 of the text; alternatives have their own."""
    body = {
        "messages": [{"role": "user", "content": SPLIT}],
        **{"logprobs": True, "top_logprobs": 2, "n": 2, "ignore_eos": True, "max_tokens": 50},
        "skip_special_tokens": skip_special_tokens,
    }
    texts, joined = ["", ""], [b"", b""]
    if streamed:
        chunks = stream(server, CHAT, body)[:-1]
        choices = [chunk["choices"][0] for chunk in chunks]
    else:
        choices = server.post(CHAT, body).json()["choices"]
    for choice in choices:
        message = choice.get("message") or choice["delta"]
        texts[choice["index"]] += message["content"]
        for entry in (choice["logprobs"] or {"content": []})["content"]:
            joined[choice["index"]] += bytes(entry["bytes"])
            for top in entry["top_logprobs"]:
                assert top["logprob"] != entry["logprob"] or top["bytes"] == entry["bytes"]
    for text, content in zip(texts, joined, strict=True):
        assert SPLIT in text
        assert content.decode(errors="replace") == text
    assert any(EOS in text for text in texts) != skip_special_tokens


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_bytes_of_completions(server: RunningServer, streamed: bool, echo: bool) -> None:
    """O-94: those of an echoed prompt too."""
    body = {"prompt": SPLIT, "logprobs": 2, "echo": echo}
    if streamed:
        choices = [chunk["choices"][0] for chunk in stream(server, COMPLETIONS, body)[:-1]]
    else:
        choices = server.post(COMPLETIONS, body).json()["choices"]
    content = b"".join(bytes(each) for choice in choices for each in choice["logprobs"]["bytes"])
    text = "".join(choice["text"] for choice in choices)
    assert content == text.encode()
    assert text == (SPLIT if echo else "") + f"[{SPLIT}]"


# What follows needs no server.


def load(tokenizer: PlainTokenizer, folder: Path) -> Tokenizer:
    save_tokenizer(tokenizer, folder)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_texts_of_tokens(make: Any, tmp_path: Path) -> None:
    """O-26: decoded text, not the tokenizer's alphabet; a space in front is a space."""
    tokenizer = load(make(), tmp_path)
    ids = tokenizer.encode("x hello\n", add_special_tokens=False)
    texts = [token_text(tokenizer, token_id) for token_id in ids]
    assert "".join(texts).lstrip() == "x hello\n"
    assert any(text.startswith(" ") for text in texts[1:])


@pytest.mark.parametrize("make", [byte_tokenizer, byte_level_tokenizer, sentencepiece_tokenizer])
def test_bytes_of_tokens(make: Any, tmp_path: Path) -> None:
    """O-94: of all tokens, by what they make of any text; added tokens are their names."""
    tokenizer = load(make(), tmp_path)
    for text in ("a 🔥 é 漢字 👨‍👩‍👧\n\x00 <tag>b</s> c", "\ufffd", "<0x41> Ġ Â ï¿½"):
        token_ids = tokenizer.encode(f"a{text}", add_special_tokens=False)
        content = b"".join(token_bytes(tokenizer, token_id) for token_id in token_ids)
        assert content.decode().lstrip() == tokenizer.decode(token_ids, skip_special_tokens=False)
    byte_tokens = [
        token_id
        for token_id in range(tokenizer.vocab_size)
        if tokenizer.decode([token_id], skip_special_tokens=False) == "\ufffd"
    ]
    partial = {token_bytes(tokenizer, token_id) for token_id in byte_tokens}
    assert {bytes([byte]) for byte in range(0x80, 0x100)} <= partial
    assert b"\xef\xbf\xbd" not in partial
    assert token_bytes(tokenizer, tokenizer.vocab_size + 5) == b""


@pytest.mark.parametrize("make", [byte_tokenizer, byte_level_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("text", ["he said hello", "é 漢字🔥 ü漢x", "a</s>b<tag>c"])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_text_offsets(make: Any, text: str, skip_special_tokens: bool, tmp_path: Path) -> None:
    """O-25: characters of several tokens count once, special tokens that are left out do not."""
    tokenizer = load(make(), tmp_path)

    def decode(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    # After a first word, as SentencePiece drops the space in front of it.
    prompt = tokenizer.encode("a", add_special_tokens=False)
    answer = tokenizer.encode(text, add_special_tokens=False)
    whole = decode(prompt + answer).removeprefix(decode(prompt))
    offsets = TextOffsets(tokenizer, skip_special_tokens=skip_special_tokens)
    found = [offsets.next(token_id) for token_id in answer]
    assert found == sorted(found)
    for token_id, offset in zip(answer, found, strict=True):
        piece = token_text(tokenizer, token_id)
        is_shown = not (skip_special_tokens and token_id in tokenizer.special_token_ids)
        if is_shown and "\ufffd" not in piece:
            assert whole[offset:].startswith(piece)
    assert offsets.next(answer[0]) == len(whole)


def test_offsets_of_tokens_that_end_within_a_character(tmp_path: Path) -> None:
    """O-25: the next token begins where that character does, not where the token before does."""
    tokenizer = load(byte_level_tokenizer(), tmp_path)
    token_ids = tokenizer.encode(" 🔦x")
    assert [token_text(tokenizer, each) for each in token_ids] == [
        " \ufffd",
        "\ufffd",
        "\ufffd",
        "x",
    ]
    offsets = TextOffsets(tokenizer, skip_special_tokens=True)
    assert [offsets.next(token_id) for token_id in token_ids] == [0, 1, 1, 2]
