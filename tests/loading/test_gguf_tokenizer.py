"""Tokenizers rebuilt from GGUF files, against definitions written down independently. O-45."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from jpaged.errors import CheckpointError, JpagedError, UnsupportedModelError
from jpaged.models.formats.gguf_file import GgufFile
from jpaged.startup.model_files import ModelFiles
from jpaged.text.tokenizer import Tokenizer
from tests.loading.llama_gguf import finish

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
LLAMA3_WORDS = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace("\\p{N}{1,3}", "\\p{N}")


def words(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    steps = [split | {"invert": False}, BYTE_LEVEL | {"use_regex": False}]
    return {"type": "Sequence", "pretokenizers": steps}


# As the tokenizer.json of SmolLM2, GPT-2, Llama 3 and Qwen2 say.
PRE_TOKENIZERS = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            BYTE_LEVEL | {"use_regex": True},
        ],
    },
    "gpt-2": BYTE_LEVEL | {"use_regex": True},
    "llama-bpe": words(LLAMA3_WORDS),
    "qwen2": words(QWEN2_WORDS),
}


def reference(
    name: str, tokens: list[str], merges: list[str], special_ids: list[int], normalizer: Any = None
) -> Backend:
    added = [
        {"id": token_id, "content": tokens[token_id], "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for token_id in special_ids
    ]
    model = {
        "type": "BPE",
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": merges,
        "ignore_merges": name == "llama-bpe",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix"), None),
    }
    definition = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": PRE_TOKENIZERS[name],
        "post_processor": None,
        "decoder": BYTE_LEVEL | {"use_regex": True},
        "model": model,
    }
    return Backend.from_str(json.dumps(definition))


PIECES = (
    *("the", " The", "Hello", " world", "don't", "I'LL", "we've", "naïve", "Straße", "e\u0301"),
    *("0", "7", "12", "345", "1234567", " 42", "3.14", "1,000", "²", "½", "٣٤", "४"),
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u200b"),
    *("😀", "👨‍👩‍👧", "🇩🇪", "❤️", "漢字", "ひらがな", "한국어", "नमस्ते", "שלום", "Привет"),
    *("!", "?!", "...", "(", ")]}", "https://x.org/a?b=c&d", "x += 1;", "#", "—", "“”", "<|", "|>"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_start|>user\n"),
)


def mixed_strings(number: int) -> list[str]:
    generator = random.Random(45)
    return ["".join(generator.choices(PIECES, k=generator.randint(1, 12))) for _ in range(number)]


def test_smollm2_tokenizes_as_its_hugging_face_definition(demo_files: ModelFiles) -> None:
    """O-45. The file is read by gguf-py's reader here."""
    fields = gguf.GGUFReader(demo_files.path).fields
    tokens, merges, types = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type")
    )
    special_ids = [token_id for token_id, kind in enumerate(types) if kind == 3]
    expected = reference("smollm", tokens, merges, special_ids)
    ours = Tokenizer.from_gguf(demo_files.gguf)
    assert ours.vocab_size == expected.get_vocab_size() == 49152
    assert ours.special_token_ids == frozenset(range(17))
    for text in mixed_strings(200):
        token_ids = ours.encode(text)
        assert token_ids == expected.encode(text).ids, repr(text)
        assert ours.decode(token_ids, skip_special_tokens=False) == text
        skipped = expected.decode(token_ids, skip_special_tokens=True)
        assert ours.decode(token_ids, skip_special_tokens=True) == skipped


def test_smollm2_has_what_its_file_says(demo_files: ModelFiles) -> None:
    tokenizer = Tokenizer.from_gguf(demo_files.gguf)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("") == []  # add_bos_token is false
    assert tokenizer.encode("2024") == [34, 32, 34, 36]  # every digit is a token
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    assert tokenizer.render_chat(chat) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    token_ids = tokenizer.encode_chat(chat)
    assert [token_ids.count(token_id) for token_id in (1, 2)] == [3, 2]


def byte_level_alphabet() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]


MERGES = ["Ġ t", "Ġt h", "Ġth e", "h e", "l l", "1 2", "12 3", "Ã ©", "'l l", "Ċ Ċ", "he ll"]
MERGED = [merge.replace(" ", "") for merge in MERGES]
TOKENS = [*byte_level_alphabet(), "'l", *MERGED, "<|begin|>", "<|end|>", "<tool>", "whole", "<a:1>"]
BOS, EOS, TOOL, WHOLE, COLON = range(len(TOKENS) - 5, len(TOKENS))


@pytest.fixture
def write_tokenizer(tmp_path: Path) -> Callable[..., GgufFile]:
    """A file with a small byte-level vocabulary; keyword arguments override its metadata."""

    def write(**overrides: Any) -> GgufFile:
        types = [gguf.TokenType.NORMAL] * len(TOKENS)
        types[BOS] = types[EOS] = types[COLON] = gguf.TokenType.CONTROL
        types[TOOL] = gguf.TokenType.USER_DEFINED
        values = {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": TOKENS,
            "token_type": types,
            "merges": MERGES,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            **overrides,
        }
        writer = gguf.GGUFWriter(tmp_path / "tokenizer.gguf", "llama")
        writer.add_tensor("x", np.zeros(1, np.float32))
        for key, value in values.items():
            add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
            if isinstance(value, list):
                writer.add_array(f"tokenizer.ggml.{key}", value)
            elif value is not None:
                add[type(value)](f"tokenizer.ggml.{key}", value)
        finish(writer)
        return GgufFile(tmp_path / "tokenizer.gguf")

    return write


WriteTokenizer = Callable[..., GgufFile]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_byte_level_tokenizers_split_as_their_models_do(
    write_tokenizer: WriteTokenizer, name: str
) -> None:
    """O-45. Qwen2 also composes letters and accents; Llama 3 prefers whole words to merges."""
    normalizer = {"type": "NFC"} if name == "qwen2" else None
    expected = reference(name, TOKENS, MERGES, [BOS, EOS, COLON], normalizer)
    ours = Tokenizer.from_gguf(write_tokenizer(pre=name, add_bos_token=False))
    texts = [*mixed_strings(200), "whole", "the 123123 we'll 'llama\n\n\n é", "<|begin|> x<|end|>"]
    for text in texts:
        assert ours.encode(text) == expected.encode(text).ids, repr(text)
    assert (ours.encode("whole") == [WHOLE]) == (name == "llama-bpe")


@pytest.mark.parametrize(
    ("keys", "before", "after"),
    [
        ({"pre": "gpt-2"}, [], []),
        ({"pre": "gpt-2", "add_bos_token": True}, [BOS], []),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, [BOS], [EOS]),
        ({"pre": "gpt-2", "add_eos_token": True}, [], [EOS]),
        ({"pre": "llama-bpe"}, [BOS], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"add_bos_token": True, "bos_token_id": COLON}, [COLON], []),
    ],
)
def test_ends_are_added_as_the_file_says(
    write_tokenizer: WriteTokenizer, keys: dict[str, Any], before: list[int], after: list[int]
) -> None:
    """O-45: BOS as add_bos_token says; without the key, as llama.cpp does."""
    tokenizer = Tokenizer.from_gguf(write_tokenizer(**keys))
    plain = tokenizer.encode("the ll", add_special_tokens=False)
    assert plain
    assert tokenizer.encode("the ll") == [*before, *plain, *after]


def test_control_tokens_are_special_and_user_defined_ones_are_text(
    write_tokenizer: WriteTokenizer,
) -> None:
    tokenizer = Tokenizer.from_gguf(write_tokenizer())
    assert tokenizer.special_token_ids == {BOS, EOS, COLON}
    token_ids = tokenizer.encode("<|begin|><tool>he<|end|>")
    assert [token_ids[0], token_ids[1], token_ids[-1]] == [BOS, TOOL, EOS]
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "<tool>he"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<|begin|><tool>he<|end|>"


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"model": "bert"}, UnsupportedModelError, "tokenizer.ggml.model .* 'bert'.* gpt2, llama"),
        ({"pre": "dbrx"}, UnsupportedModelError, "tokenizer.ggml.pre .* 'dbrx'; .* smollm"),
        ({"pre": "default"}, UnsupportedModelError, "'default'; it is not known"),
        ({"pre": None}, UnsupportedModelError, "'default'; it is not known"),
        ({"model": None}, CheckpointError, "has no tokenizer.ggml.model"),
        ({"tokens": None}, CheckpointError, "tokenizer.ggml.tokens .* must be a list of strings"),
        ({"tokens": [*TOKENS[:-1], "!"]}, CheckpointError, "tokenizer.ggml.tokens .* '!' twice"),
        ({"merges": None}, CheckpointError, "tokenizer.ggml.merges .* must be a list of strings"),
        ({"merges": ["h x"]}, CheckpointError, "has 'h x', which does not make one token"),
        ({"merges": ["hx"]}, CheckpointError, "has 'hx', which does not make one token"),
        ({"token_type": [1, 1]}, CheckpointError, "273 tokens, but 2 tokenizer.ggml.token_type"),
        ({"bos_token_id": 999}, CheckpointError, "bos_token_id .* is 999 of 273 tokens"),
        (
            {"bos_token_id": None, "add_bos_token": True},
            CheckpointError,
            "has no tokenizer.ggml.bos_token_id",
        ),
        ({"model": "llama"}, CheckpointError, "has no tokenizer.ggml.scores"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_by_name(
    write_tokenizer: WriteTokenizer,
    keys: dict[str, Any],
    error: type[JpagedError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(write_tokenizer(**keys))


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Bytes, and 300 pieces of random letters with random scores."""
    generator = random.Random(0)
    letters = ["▁", *"abcdeé漢"]
    pieces = list(letters)
    while len(pieces) < 300:
        piece = generator.choice(pieces) + generator.choice(pieces)
        if len(piece) <= 6 and piece not in pieces:
            pieces.append(piece)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    types += [kinds.BYTE] * 256 + [kinds.NORMAL] * len(pieces)
    scores = [0.0] * 259 + [-float(rank) for rank in generator.sample(range(300), 300)]
    return tokens, scores, types


def merge_by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's algorithm: join the neighbours whose piece has the highest score."""
    score_of = dict(zip(tokens, scores, strict=True))
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [left + right for left, right in zip(symbols, symbols[1:], strict=False)]
        known = [(score_of[pair], -index) for index, pair in enumerate(pairs) if pair in score_of]
        if not known:
            break
        index = -max(known)[1]
        symbols[index : index + 2] = [pairs[index]]
    token_ids: list[int] = []
    for symbol in symbols:
        in_bytes = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        token_ids += map(tokens.index, [symbol] if symbol in score_of else in_bytes)
    return token_ids


def test_sentencepiece_vocabulary_is_merged_by_score(write_tokenizer: WriteTokenizer) -> None:
    tokens, scores, types = sentencepiece_vocabulary()
    keys = {"tokens": tokens, "scores": scores, "token_type": types, "merges": None}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    tokenizer = Tokenizer.from_gguf(write_tokenizer(model="llama", pre="default", **keys, **ends))
    generator = random.Random(1)
    for _ in range(200):
        text = "".join(generator.choices([*"abcdeé漢  ", "😀", "z", "\n"], k=12))
        token_ids = tokenizer.encode(text)
        assert token_ids == [1, *merge_by_score(text, tokens, scores)], repr(text)
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == text


def test_sentencepiece_without_space_prefix(write_tokenizer: WriteTokenizer) -> None:
    tokens, scores, types = sentencepiece_vocabulary()
    keys = {"tokens": tokens, "scores": scores, "token_type": types, "merges": None}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    file = write_tokenizer(
        model="llama", add_space_prefix=False, add_bos_token=False, **keys, **ends
    )
    tokenizer = Tokenizer.from_gguf(file)
    assert tokenizer.encode("a") == [tokens.index("a")]
    token_ids = tokenizer.encode(" ab")
    assert tokens[token_ids[0]].startswith("▁")
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == " ab"


@pytest.mark.parametrize(
    ("keys", "has_template"),
    [
        ({"": "default"}, True),
        ({"": "default", ".tool_use": "tools"}, True),
        ({".tool_use": "tools"}, False),
        ({"": ""}, False),
        ({}, False),
    ],
)
def test_chat_templates_of_gguf_files(
    write_tokenizer: WriteTokenizer, keys: dict[str, str], has_template: bool
) -> None:
    """O-78."""
    file = write_tokenizer()
    file.metadata |= {f"tokenizer.chat_template{name}": text for name, text in keys.items()}
    tokenizer = Tokenizer.from_gguf(file)
    assert tokenizer.has_chat_template == has_template
    if has_template:
        assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "default"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("", 5, r"^tokenizer\.chat_template in tokenizer\.gguf must be a string, got 5"),
        (".rag", [1], r"^tokenizer\.chat_template\.rag in tokenizer\.gguf must be a string"),
        ("", "{% if %}", "the chat template in tokenizer.gguf is no valid Jinja template"),
    ],
)
def test_what_is_no_chat_template_is_named(
    write_tokenizer: WriteTokenizer, key: str, value: Any, message: str
) -> None:
    """O-78."""
    file = write_tokenizer()
    file.metadata[f"tokenizer.chat_template{key}"] = value
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(file)
