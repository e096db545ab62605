"""How much attention changes when K/V are stored in one byte a number."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import TritonPagedAttention, XlaPagedAttention
from pallas_kernels.testing import AttentionShape, ragged_batch
from tests.kernels.oracle import paged_attention_oracle

SHAPE = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=64)
ROWS = [(1, 1), (1, 33), (1, 300), (17, 40), (64, 64)]
# Root of the mean square of the difference, relative to that of the answer; twice what is seen.
TOLERATED = {"int8": 0.02, "float8_e4m3fn": 0.06, "float8_e5m2": 0.12}


def attend(backend, batch, pool_dtype):
    """Over the batch's K/V, written into a pool of that type."""
    stored, block_size = jnp.nan_to_num(jnp.array(batch.pool)), batch.pool.shape[1]
    kv_scales = None
    if pool_dtype == "int8":
        kv_scales = backend.largest_values(stored) / 127
    key, value = (stored[:, :, first::2].reshape(-1, 2, 64) for first in (0, 1))
    pool = backend.write(
        jnp.zeros(stored.shape, pool_dtype),
        key,
        value,
        jnp.arange(key.shape[0]),
        kv_scales=kv_scales,
    )
    query = jnp.array(batch.query)
    plan = backend.plan(
        batch.metadata, num_tokens=query.shape[0], block_size=block_size, decode_only=False
    )
    out = backend.attend(query, pool, plan, scale=SHAPE.score_scale, kv_scales=kv_scales)
    return np.asarray(out)[: batch.num_tokens]


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("pool_dtype", TOLERATED)
def test_error_of_one_byte(backend, pool_dtype):
    random = np.random.default_rng(0)
    batch = ragged_batch(random, ROWS, SHAPE, block_size=16)
    attention = (
        XlaPagedAttention()
        if backend == "xla"
        else TritonPagedAttention(group=SHAPE.group, head_dim=SHAPE.head_dim, interpret=True)
    )
    exact = paged_attention_oracle(batch, scale=SHAPE.score_scale)[: batch.num_tokens]
    error = attend(attention, batch, pool_dtype) - exact
    relative = float(np.sqrt(np.mean(error**2) / np.mean(exact**2)))
    assert TOLERATED[pool_dtype] / 10 < relative < TOLERATED[pool_dtype]
