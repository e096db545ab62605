"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library."""

from collections.abc import Callable
from typing import Any

from gguf.constants import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.models.config_reader import ConfigReader
from jpaged.models.formats.gguf_file import GgufFile

SPACE = "▁"  # how SentencePiece vocabularies write a space

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Splits text as the tokenizer does that the file was converted from.

    Raises `UnsupportedModelError` when that is not known, `CheckpointError` for damaged metadata.
    """
    reader = ConfigReader(file.metadata, name=file.path.name)
    kind = reader.string("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model in {reader.name} is {kind!r}; supported: {', '.join(_BUILDERS)}"
        )
    tokenizer = _BUILDERS[kind](reader)
    _add_whole_tokens(tokenizer, reader)
    _add_ends(tokenizer, reader, kind)
    return tokenizer


def special_token(file: GgufFile, role: str) -> str | None:
    """Text of the token with a role such as "bos", "eos", "unknown" or "padding"."""
    reader = ConfigReader(file.metadata, name=file.path.name)
    has_role = reader.values.get(f"tokenizer.ggml.{role}_token_id") is not None
    return _token_with_role(reader, role)[0] if has_role else None


def chat_templates(file: GgufFile) -> dict[str, str]:
    """Chat templates by name; "default" is the one for plain chats."""
    reader = ConfigReader(file.metadata, name=file.path.name)
    key = "tokenizer.chat_template"
    keys = {"default": key} if key in file.metadata else {}
    keys |= {
        name.removeprefix(f"{key}."): name for name in file.metadata if name.startswith(f"{key}.")
    }
    return {name: reader.string(key) for name, key in keys.items()}


def _token_with_role(reader: ConfigReader, role: str) -> tuple[str, int]:
    key = f"tokenizer.ggml.{role}_token_id"
    token_id = reader.integer(key, minimum=0)
    tokens = _tokens(reader)
    if token_id >= len(tokens):
        raise CheckpointError(f"{key} in {reader.name} is {token_id} of {len(tokens)} tokens")
    return tokens[token_id], token_id


def _tokens(reader: ConfigReader) -> list[str]:
    return _strings(reader, "tokenizer.ggml.tokens")


def _strings(reader: ConfigReader, key: str) -> list[str]:
    strings = reader.values.get(key)
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise CheckpointError(f"{key} in {reader.name} must be a list of strings")
    return strings


def _vocabulary(reader: ConfigReader) -> dict[str, int]:
    tokens = _tokens(reader)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocabulary[token] > token_id)
        raise CheckpointError(f"tokenizer.ggml.tokens in {reader.name} has {twice!r:.80} twice")
    return vocabulary


def _byte_level_tokenizer(reader: ConfigReader) -> Tokenizer:
    name = reader.string("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre in {reader.name} is {name!r}; it is not known how such a "
            f"tokenizer splits text; supported: {', '.join(_PRE_TOKENIZERS)}"
        )
    vocabulary = _vocabulary(reader)
    merges = _merges(reader, vocabulary)
    is_llama3 = name in _LLAMA3_NAMES
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=is_llama3))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(reader: ConfigReader, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in _strings(reader, "tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(
                f"tokenizer.ggml.merges in {reader.name} has {merge!r:.80}, which does not make "
                "one token of the vocabulary out of two"
            )
        merges.append((left, right))
    return merges


def _sentencepiece_tokenizer(reader: ConfigReader) -> Tokenizer:
    """Byte-pair encoding whose merges follow from the scores, with bytes for unknown letters."""
    vocabulary = _vocabulary(reader)
    scores = reader.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary):
        raise CheckpointError(
            f"{reader.name} has {len(vocabulary)} tokens, but {len(scores)} tokenizer.ggml.scores"
        )
    unknown_token, _ = _token_with_role(reader, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges_from_scores(vocabulary, scores),
            unk_token=unknown_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_space_prefix = reader.boolean("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend(SPACE)] if has_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_from_scores(
    vocabulary: dict[str, int], scores: tuple[float, ...]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others; the token with the highest score comes first."""
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for token, token_id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                order = (-scores[token_id], token_id, vocabulary[left], vocabulary[right])
                ranked.append((*order, left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_whole_tokens(tokenizer: Tokenizer, reader: ConfigReader) -> None:
    """Control and user-defined tokens are found in a text before anything else is done to it."""
    tokens = _tokens(reader)
    types = reader.numbers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{reader.name} has {len(tokens)} tokens, but {len(types)} tokenizer.ggml.token_type"
        )
    added = [
        AddedToken(token, normalized=False, special=token_type != TokenType.USER_DEFINED)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    ]
    tokenizer.add_tokens(added)


def _add_ends(tokenizer: Tokenizer, reader: ConfigReader, kind: str) -> None:
    """Put the begin- and end-of-sequence tokens around each text, where the model wants them."""
    adds_bos_unasked = kind == "llama" or reader.values.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    bos = ["bos"] if reader.boolean("tokenizer.ggml.add_bos_token", adds_bos_unasked) else []
    eos = ["eos"] if reader.boolean("tokenizer.ggml.add_eos_token", False) else []
    ends = []
    for role in (*bos, *eos):
        token, token_id = _token_with_role(reader, role)
        ends.append({"id": role, "ids": [token_id], "tokens": [token]})
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos], special_tokens=ends
        )


def _byte_level(*, has_regex: bool = True) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_regex)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _words(digits: str) -> Any:
    pattern = Regex(_WORDS.replace("{DIGITS}", digits))
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), _byte_level(has_regex=False)]
    )


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3")
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "qwen2": lambda: _words(""),
    **dict.fromkeys(_LLAMA3_NAMES, lambda: _words("{1,3}")),
}
_BUILDERS = {"gpt2": _byte_level_tokenizer, "llama": _sentencepiece_tokenizer}
