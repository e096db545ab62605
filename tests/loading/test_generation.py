"""What a model's files say about generating: where answers end, and sampling defaults."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import TokenType

from jpaged.config import EngineConfig
from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.config_reader import ConfigReader
from jpaged.models.formats.gguf_generation import end_token_ids, sampling_config
from jpaged.startup.generation import answer_end_ids, sampling_defaults
from jpaged.startup.model_files import ModelFiles, load_generation_config, resolve_model
from jpaged.text.tokenizer import Tokenizer
from tests.doubles import EOS, byte_tokenizer, save_tokenizer

VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(byte_tokenizer(), folder)
    return Tokenizer.from_folder(folder)


def generation_config(**values: Any) -> ConfigReader:
    return ConfigReader(values, name="generation_config.json")


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (7, {"eos_token_id": 9}, {7, 9}),
        (7, {"eos_token_id": [9, 8]}, {7, 8, 9}),
        (7, {"eos_token_id": None}, {7}),
        (7, {}, {7}),
        (None, {}, set()),
    ],
)
def test_answers_end_at_all_tokens_that_any_file_names(
    hf_config: dict[str, Any],
    tokenizer: Tokenizer,
    in_config: Any,
    in_generation_config: dict[str, Any],
    expected: set[int],
) -> None:
    """O-52, O-76."""
    keys = {"eos_token_id": in_config, "vocab_size": VOCAB_SIZE}
    model, reader = ModelConfig.from_hf(hf_config | keys), generation_config(**in_generation_config)
    eos = tokenizer.encode(EOS)[0]
    assert set(answer_end_ids(model, reader, tokenizer)) == expected | {eos}
    assert set(answer_end_ids(model, reader, None)) == expected


def test_ends_are_logged(
    hf_config: dict[str, Any], tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """O-76."""
    eos = tokenizer.encode(EOS)[0]
    large = ModelConfig.from_hf(hf_config | {"vocab_size": VOCAB_SIZE})
    small = ModelConfig.from_hf(hf_config | {"vocab_size": 51})
    with caplog.at_level(logging.INFO, logger="jpaged"):
        answer_end_ids(large, generation_config(), tokenizer)
        assert f"answers end at </s> ({eos}), # (2)" in caplog.text
        assert answer_end_ids(small, generation_config(), tokenizer) == (2,)
    assert f"has the id {eos}, beyond the model's vocabulary of 51 tokens" in caplog.text


def test_end_beyond_the_vocabulary_is_named(hf_config: dict[str, Any]) -> None:
    """O-76."""
    message = r"eos_token_id in generation_config\.json has the token id 51, .* ends at 50"
    with pytest.raises(CheckpointError, match=message):
        answer_end_ids(ModelConfig.from_hf(hf_config), generation_config(eos_token_id=51), None)


# Token, type, whether it ends an answer.
GGUF_TOKENS = [
    ("<|endoftext|>", TokenType.CONTROL, True),
    ("<|im_start|>", TokenType.CONTROL, False),
    ("<|im_end|>", TokenType.CONTROL, True),
    ("<|eot_id|>", TokenType.USER_DEFINED, True),
    ("</s>", TokenType.NORMAL, False),  # a piece that words are made of
    ("<|end|>", TokenType.CONTROL, True),
    ("<end_of_turn>", TokenType.CONTROL, True),
    ("end", TokenType.NORMAL, False),
]
GGUF_ENDS = [index for index, (_, _, is_end) in enumerate(GGUF_TOKENS) if is_end]


def gguf_metadata(**keys: Any) -> ConfigReader:
    tokens = {"tokens": [token for token, *_ in GGUF_TOKENS]}
    types = {"token_type": [kind for _, kind, _ in GGUF_TOKENS]}
    values = tokens | types | keys
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return ConfigReader(metadata, name="model.gguf")


@pytest.mark.parametrize(
    ("keys", "also"),
    [({}, []), ({"eos_token_id": 7}, [7]), ({"eos_token_id": 1, "eot_token_id": 4}, [1, 4])],
)
def test_gguf_ends_are_named_or_known_by_their_text(keys: dict[str, int], also: list[int]) -> None:
    """O-79."""
    found = end_token_ids(gguf_metadata(**keys), vocab_size=8)
    assert found == list(dict.fromkeys(also + GGUF_ENDS))


def test_gguf_without_a_tokenizer_has_the_named_ends_only() -> None:
    reader = gguf_metadata(tokens=None, token_type=None, eos_token_id=3)
    assert end_token_ids(reader, vocab_size=8) == [3]


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "eom_token_id"])
def test_gguf_end_beyond_the_vocabulary_is_named(key: str) -> None:
    """O-79."""
    message = rf"tokenizer\.ggml\.{key} in model\.gguf has the token id 77777, .* ends at 7"
    with pytest.raises(CheckpointError, match=message):
        end_token_ids(gguf_metadata(**{key: 77777}), vocab_size=8)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        (
            {"do_sample": True, "temperature": 0.05, "top_k": 1, "top_p": 0.9, "eos_token_id": 2},
            {"temperature": 0.05, "top_k": 1, "top_p": 0.9},
        ),
        ({"temperature": None, "top_k": None, "top_p": 0.9, "do_sample": None}, {"top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}),
        ({"do_sample": False}, {"temperature": 0.0}),
    ],
)
def test_sampling_defaults_are_those_of_the_file(
    values: dict[str, Any], expected: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """O-75: and the log says so."""
    with caplog.at_level(logging.INFO, logger="jpaged"):
        assert sampling_defaults(generation_config(**values)) == expected
    for name, value in expected.items():
        assert f"{name} {value}" in caplog.text
    assert bool(caplog.records) == bool(expected)


def test_what_is_recommended_but_not_applied_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """O-75."""
    reader = generation_config(encoder_repetition_penalty=1.1, max_new_tokens=5, num_beams=1)
    assert sampling_defaults(reader) == {}
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().endswith("max_new_tokens 5, encoder_repetition_penalty 1.1")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_k", 0.5),
        ("do_sample", "no"),
    ],
)
def test_nonsense_is_named_unless_it_is_not_used(
    key: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """O-75."""
    reader = generation_config(**{key: value})
    with pytest.raises(CheckpointError, match=f"^{key} in generation_config.json .* got {value!r}"):
        sampling_defaults(reader)
    with caplog.at_level(logging.INFO, logger="jpaged"):
        assert sampling_defaults(reader, is_used=False) == {}
    assert key == "do_sample" or f"json is not used: {key} {value!r}" in caplog.text


def test_generation_config_is_found(tmp_path: Path) -> None:
    """O-75: the model's own, or that of the folder in the option."""
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir(), other.mkdir()
    files = ModelFiles(kind="folder", path=model, name="x")
    assert load_generation_config(files, "auto").values == {}
    (model / "generation_config.json").write_text(json.dumps({"top_k": 5}))
    (other / "generation_config.json").write_text(json.dumps({"top_k": 9}))
    assert load_generation_config(files, "auto").values == {"top_k": 5}
    assert load_generation_config(files, "vllm").values == {
        "top_k": 5
    }  # its EOS counts all the same
    assert load_generation_config(files, str(other)).values == {"top_k": 9}
    with pytest.raises(CheckpointError, match=r"has no generation_config\.json"):
        load_generation_config(files, str(tmp_path / "nowhere"))


def test_gguf_may_recommend_sampling_parameters() -> None:
    """O-75: in llama.cpp's metadata."""
    metadata = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.name": "x"}
    assert sampling_config(metadata) == {"temperature": 0.7, "top_k": 20}


def test_demo_model_has_the_sampling_that_its_makers_recommend() -> None:
    files = resolve_model(EngineConfig().model)
    defaults = sampling_defaults(load_generation_config(files, EngineConfig().generation_config))
    assert defaults == {"temperature": 0.2, "top_p": 0.9}
