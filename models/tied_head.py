"""Whether the output head of a tied model is really its embedding."""

import logging
from dataclasses import replace

import numpy as np

from jpaged.models.config import ModelConfig
from jpaged.models.formats.tensor_source import TensorSource

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS_AT_A_TIME = 1024

logger = logging.getLogger(__name__)


def with_stored_head(config: ModelConfig, source: TensorSource) -> ModelConfig:
    """The config of the weights that are there: untied if they have a head of their own.

    Fine-tunes are saved with another head although their config still says tie_word_embeddings.
    transformers computes with the stored one, too. Reads both tensors, if both are there, a few
    rows at a time.
    """
    if not config.tie_word_embeddings or not {EMBEDDING, HEAD} <= set(source.names()):
        return config
    if _are_equal(source):
        return config
    logger.warning(
        "tie_word_embeddings is true, but %s in %s differs from %s: the stored head is used. "
        "Set tie_word_embeddings to false in config.json.",
        HEAD,
        source.location(HEAD),
        EMBEDDING,
    )
    return replace(config, tie_word_embeddings=False)


def _are_equal(source: TensorSource) -> bool:
    shape = source.shape(EMBEDDING)
    if shape != source.shape(HEAD) or not shape:
        return False
    return all(
        np.array_equal(source.read(EMBEDDING, rows), source.read(HEAD, rows))
        for start in range(0, shape[0], ROWS_AT_A_TIME)
        for rows in [slice(start, min(start + ROWS_AT_A_TIME, shape[0]))]
    )
