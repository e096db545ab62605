"""What a GGUF file says about generating: where answers end, and how tokens are drawn."""

from collections.abc import Mapping
from typing import Any

from gguf.constants import TokenType

from jpaged.models.config_reader import ConfigReader

# End of text, of a turn and of a message.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end an answer by their text alone, as in llama.cpp (`llama_vocab::impl::load`): many
# files name only the base model's end of text, but the fine-tune ends its turns with one of these.
END_TEXTS = frozenset(
    (
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>"),
        *("<end_of_turn>", "<end_of_utterance>", "<|endoftext|>", "<|end_of_text|>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>", "<｜end▁of▁sentence｜>"),
    )
)
# Sampling metadata, under the names that generation_config.json has for the same things.
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "xtc_probability": "xtc_probability",
    "mirostat": "mirostat",
}


def end_token_ids(reader: ConfigReader, *, vocab_size: int) -> list[int]:
    """Tokens that the metadata names as ends, then those that are known by their text.

    Raises `CheckpointError` that names the key of an id beyond the vocabulary.
    """
    found: list[int] = []
    for key in _END_KEYS:
        found += reader.token_ids(f"tokenizer.ggml.{key}", vocab_size=vocab_size)
    found += (token_id for token_id in _ends_by_text(reader.values) if token_id < vocab_size)
    return list(dict.fromkeys(found))


def sampling_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Recommended sampling parameters, in the terms of a generation_config.json."""
    found = {ours: metadata.get(f"general.sampling.{key}") for key, ours in _SAMPLING_KEYS.items()}
    return {key: value for key, value in found.items() if value is not None}


def _ends_by_text(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens in `END_TEXTS` that text is not split into: a piece of a word ends nothing.

    Files without a tokenizer have none; a damaged one is reported when it is read as a whole.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(types, list):
        return []
    whole = (TokenType.CONTROL, TokenType.USER_DEFINED)
    return [
        token_id
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False))
        if token in END_TEXTS and token_type in whole
    ]
