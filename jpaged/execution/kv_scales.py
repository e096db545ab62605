"""Scales of a KV cache of int8: how large keys and values of a model become, measured at start.

They are constants of the model, whatever is asked of it later: an answer depends on no other
request. Types of float8 have exponents of their own and need none.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.models.loading import Model
from pallas_kernels.paged_attention import AttentionMetadata, XlaPagedAttention

NUM_CALIBRATION_TOKENS = 256
BLOCK_SIZE = 16
# Room for what is larger in other texts; still larger ones become the largest that is possible.
MARGIN = 1.1


def with_kv_scales(model: Model, kv_dtype: jnp.dtype) -> Model:
    """The model with the scales that a KV cache of this type needs."""
    if not jnp.issubdtype(kv_dtype, jnp.integer):
        return model
    tokens = calibration_tokens(model.config.vocab_size, model.config.max_position_embeddings)
    limit = jnp.iinfo(kv_dtype).max
    return model.with_kv_scales(
        [
            # What was never anything but 0 has no size to go by.
            jnp.where(largest > 0, largest * (MARGIN / limit), 1.0)
            for largest in largest_values(model, tokens)
        ]
    )


def calibration_tokens(vocab_size: int, max_num_tokens: int) -> Int[np.ndarray, "T"]:
    """Tokens of all kinds, in no order: no tokenizer is needed, which a model may lack."""
    num_tokens = min(NUM_CALIBRATION_TOKENS, max_num_tokens)
    return np.random.default_rng(0).integers(0, vocab_size, num_tokens, np.int32)


def largest_values(model: Model, token_ids: Int[np.ndarray, "T"]) -> list[Float[Array, "K2"]]:
    """Largest absolute keys and values of every layer and KV head, interleaved, over one text."""
    attention, num_tokens, config = XlaPagedAttention(), len(token_ids), model.config
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    pool_shape = attention.pool_shape(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )

    @jax.jit
    def run(params: tuple[Array, ...], token_ids: Int[Array, "T"]) -> list[Float[Array, "K2"]]:
        positions = jnp.arange(num_tokens, dtype=jnp.int32)
        metadata = AttentionMetadata(
            block_tables=jnp.arange(num_blocks, dtype=jnp.int32)[None],
            context_lens=jnp.array([num_tokens], jnp.int32),
            query_starts=jnp.array([0, num_tokens], jnp.int32),
            num_decodes=jnp.int32(0),
        )
        plan = attention.plan(
            metadata, num_tokens=num_tokens, block_size=BLOCK_SIZE, decode_only=False
        )
        pools = (jnp.zeros(pool_shape, model.dtype),) * config.num_layers
        # A sequence alone in a pool: slots are positions.
        _, pools = model.merge(params)(
            token_ids, positions, positions, pools, plan, attention=attention
        )
        return [attention.largest_values(pool) for pool in pools]

    return run(model.params, token_ids)
