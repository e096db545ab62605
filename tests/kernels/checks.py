"""Runs a backend on a ragged batch, and compares with float64 numpy."""

from contextlib import redirect_stdout
from io import StringIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import (
    MosaicPagedAttention,
    TritonPagedAttention,
    XlaPagedAttention,
)
from pallas_kernels.testing import TOLERANCES, AttentionShape, ragged_batch
from tests.kernels.oracle import paged_attention_oracle

KV_LENS = [1, 7, 15, 16, 17, 31, 33, 192, 1025]
PREFILLS = [
    (query_len, kv_len)
    for kv_len in KV_LENS
    for query_len in sorted({5, 17, kv_len})
    if 1 < query_len <= kv_len
]
DECODES = [(1, kv_len) for kv_len in KV_LENS]
MIXED = [(1, 5), (1, 16), (1, 300), (1, 33), (17, 17), (70, 200), (5, 1025), (64, 64)]


def make_backend(name, shape):
    """Of the TPU kernels, K/V come in small pieces, so that a few hundred tokens are many. With
    "races" in the name, copies take effect only when they are waited for, and races fail."""
    if name == "xla":
        return XlaPagedAttention()
    if name == "triton":
        return TritonPagedAttention(group=shape.group, head_dim=shape.head_dim, interpret=True)
    return MosaicPagedAttention(
        num_kv_heads=shape.num_kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        interpret=pltpu.InterpretParams(detect_races=True) if "races" in name else True,
        fetch_bytes=128 << 10,
        chunk_tokens=32,
    )


def attend(backend, batch, *, decode_only, window=None, sinks=None, **options):
    """Twice, as the order of float additions must not change. The window is traced."""

    @jax.jit
    def run(query, pool, metadata, traced):
        plan = backend.plan(
            metadata,
            num_tokens=query.shape[0],
            block_size=batch.pool.shape[1],
            decode_only=decode_only,
        )
        return backend.attend(query, pool, plan, **options, **traced)

    traced = {"window": window, "sinks": sinks, "kv_scales": batch.kv_scales}
    traced = {name: jnp.asarray(value) for name, value in traced.items() if value is not None}
    arrays = jnp.array(batch.query), fill_pool(backend, batch), batch.metadata, traced
    with redirect_stdout(StringIO()) as printed:
        first, again = np.asarray(run(*arrays)), np.asarray(run(*arrays))
    np.testing.assert_array_equal(first, again)
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()
    return first.astype(np.float64)


def fill_pool(backend, batch):
    """The batch's K/V, NaN included, in the backend's own layout."""
    num_blocks, block_size, num_heads, head_dim = batch.pool.shape
    sizes = {"num_kv_heads": num_heads // 2, "head_dim": head_dim}
    size = backend.pool_shape(num_blocks=num_blocks, block_size=block_size, **sizes)
    tokens = batch.pool.reshape(-1, num_heads, head_dim).astype(np.float32)
    slots = jnp.arange(len(tokens), dtype=jnp.int32)
    pool = jnp.zeros(size, batch.pool.dtype)
    return backend.write(pool, jnp.array(tokens[:, 0::2]), jnp.array(tokens[:, 1::2]), slots)


def check(
    name, rows, shape, *, block_size=16, dtype="float32", pool_dtype=None, window=None, pad_rows=2
):
    random = np.random.default_rng(block_size + shape.head_dim)
    decode_only = all(query_len == 1 for query_len, _ in rows)
    batch = ragged_batch(
        random,
        rows,
        shape,
        block_size=block_size,
        dtype=dtype,
        pool_dtype=pool_dtype,
        window=None if name == "xla" else window,  # XLA reads what it then hides
        pad_rows=pad_rows,
        pad_tokens=pad_rows if decode_only else 3,  # row s of decodes is token s
    )
    sinks = random.normal(size=shape.num_heads).astype(np.float32) if shape.has_sinks else None
    options = {
        "scale": shape.score_scale,
        "window": window,
        "softcap": shape.softcap,
        "sinks": sinks,
    }
    out = attend(make_backend(name, shape), batch, decode_only=decode_only, **options)
    expected = paged_attention_oracle(batch, **options)
    real = slice(batch.num_tokens)
    np.testing.assert_allclose(out[real], expected[real], atol=TOLERANCES[dtype], rtol=0)
    assert np.isfinite(out).all(), "rows of padding must be finite"


def heads(group, head_dim, **options):
    return AttentionShape(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, **options)
