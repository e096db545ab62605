"""What a model's files say about generating: where answers end, and how tokens are drawn."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jpaged.config import NO_GENERATION_CONFIG
from jpaged.errors import CheckpointError, RequestError
from jpaged.models.config import ModelConfig
from jpaged.models.config_reader import ConfigReader
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer

# Keys of generation_config.json that change which tokens are drawn, with the values that change
# nothing. Those that `SamplingParams` has become defaults; of the others the log tells.
_SAMPLING_KEYS: dict[str, tuple[object, ...]] = {
    "temperature": (1,),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "max_new_tokens": (),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "sequence_bias": (),
    "min_new_tokens": (0,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "num_beams": (1,),
    "xtc_probability": (0,),
    "mirostat": (0,),
}
_PARAMETERS = frozenset(item.name for item in fields(SamplingParams))
_REMEDY = (
    f"correct it, or start with generation_config={NO_GENERATION_CONFIG} "
    f"(--generation-config {NO_GENERATION_CONFIG}), which uses none of these defaults"
)

logger = logging.getLogger(__name__)


def answer_end_ids(
    model: ModelConfig, generation: ConfigReader, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Collect the tokens that end an answer from all files of the model, as vLLM does.

    Fine-tunes often end their turns with the tokenizer's EOS, while configs still name that of the
    base model. Raises `CheckpointError` for an id that is no token of the model.
    """
    found = [
        *generation.token_ids("eos_token_id", vocab_size=model.vocab_size),
        *model.eos_token_ids,
    ]
    eos = None if tokenizer is None else tokenizer.eos_token_id
    if eos is not None:
        if eos < model.vocab_size:
            found.insert(0, eos)
        else:
            logger.warning(
                "the tokenizer's end-of-sequence token has the id %d, beyond the model's "
                "vocabulary of %d tokens: it ends no answer",
                eos,
                model.vocab_size,
            )
    ids = tuple(dict.fromkeys(found))
    logger.info("answers end at %s", ", ".join(_named(ids, tokenizer)) or "no token of their own")
    return ids


def sampling_defaults(generation: ConfigReader, *, is_used: bool = True) -> dict[str, Any]:
    """Return arguments of `SamplingParams` for requests that do not give them.

    is_used: whether defaults of the model are wanted; without, the log only names what it has.
    Raises `CheckpointError` for a value that no request could have.
    """
    recommended = _recommended(generation)
    if not is_used:
        if recommended:
            logger.info("%s is not used: %s", generation.name, _shown(recommended))
        return {}
    generation.boolean("do_sample", None)
    defaults = {
        key: _checked(key, value, generation.name)
        for key, value in recommended.items()
        if key in _PARAMETERS
    }
    if defaults:
        logger.info(
            "sampling defaults of %s, where a request does not say: %s",
            generation.name,
            _shown(defaults),
        )
    ignored = {key: value for key, value in recommended.items() if _is_ignored(key, value)}
    if ignored:
        logger.warning(
            "%s recommends what is not supported and not applied: %s",
            generation.name,
            _shown(ignored),
        )
    return defaults


def _recommended(generation: ConfigReader) -> dict[str, Any]:
    """Select the keys in `_SAMPLING_KEYS` that the file has; null counts as absent.

    do_sample false is temperature 0: transformers takes the likeliest token then, whatever the
    other keys say.
    """
    given = {key: generation.values.get(key) for key in _SAMPLING_KEYS}
    recommended = {key: value for key, value in given.items() if value is not None}
    if generation.values.get("do_sample") is False:
        for key in ("top_k", "top_p", "min_p", "typical_p"):
            recommended.pop(key, None)
        recommended["temperature"] = 0.0
    return recommended


def _checked(key: str, value: Any, name: str) -> Any:
    try:
        SamplingParams(**{key: value})
    except RequestError as error:
        raise CheckpointError(f"{key} in {name} is no default: {error}; {_REMEDY}") from error
    return value


def _is_ignored(key: str, value: Any) -> bool:
    return key not in _PARAMETERS and value not in _SAMPLING_KEYS[key]


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value!r:.40}" for key, value in values.items())


def _named(token_ids: tuple[int, ...], tokenizer: Tokenizer | None) -> list[str]:
    if tokenizer is None:
        return [str(token_id) for token_id in token_ids]
    return [
        f"{tokenizer.decode([token_id], skip_special_tokens=False)} ({token_id})"
        for token_id in token_ids
    ]
