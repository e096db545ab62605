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
from pallas_kernels.paged_attention.api import SINK_BLOCK
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
GROUPS = [1, 3, 4, 8]
# (number of the case, block size, head dimension). Groups by the case's number meet all of both.
BLOCKS_AND_HEADS = [
    (row + column, block_size, head_dim)
    for row, block_size in enumerate([8, 16, 32, 128])
    for column, head_dim in enumerate([64, 80, 96, 128, 256])
]
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


def write_and_attend(
    backend, batch, *, decode_only, window=None, sinks=None, twice=False, **options
):
    """Run a layer on a pool that lacks the K/V of the step's own tokens. The window is traced.

    Returns answers and pool. twice: run it again, and compare bit by bit: the order of float
    additions must not change.
    """
    block_size = batch.pool.shape[1]

    @jax.jit
    def run(query, key, value, pool, slots, metadata, traced):
        plan = backend.plan(
            metadata, num_tokens=len(query), block_size=block_size, decode_only=decode_only
        )
        inputs = query, key, value, pool, slots, plan
        return backend.write_and_attend(*inputs, **options, **traced)

    traced = {"window": window, "sinks": sinks, "kv_scales": batch.kv_scales}
    traced = {name: jnp.asarray(value) for name, value in traced.items() if value is not None}
    key, value = new_kv(batch)
    pool = fill_pool(backend, batch, without=batch.slots[: batch.num_tokens])
    slots = jnp.array(batch.slots)
    arrays = jnp.array(batch.query), jnp.array(key), jnp.array(value), pool, slots
    with redirect_stdout(StringIO()) as printed:
        runs = [jax.device_get(run(*arrays, batch.metadata, traced)) for _ in range(1 + twice)]
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()
    for out, pool in runs[1:]:
        np.testing.assert_array_equal(out, runs[0][0])
        assert_same_pool(pool, runs[0][1])
    return runs[0]


def new_kv(batch):
    """Of the query tokens; NaN for padding."""
    stored = batch.pool.reshape(-1, *batch.pool.shape[2:])[batch.slots].astype(np.float32)
    stored[batch.num_tokens :] = np.nan
    if batch.kv_scales is not None:
        stored *= batch.kv_scales[:, None]
    return stored[:, 0::2], stored[:, 1::2]


def fill_pool(backend, batch, *, without=()):
    """The batch's K/V, NaN included, in the backend's own layout; without these slots."""
    num_blocks, block_size, num_heads, head_dim = batch.pool.shape
    sizes = {"num_kv_heads": num_heads // 2, "head_dim": head_dim}
    size = backend.pool_shape(num_blocks=num_blocks, block_size=block_size, **sizes)
    tokens = batch.pool.reshape(-1, num_heads, head_dim).astype(np.float32)
    tokens[list(without)] = np.nan
    slots = jnp.arange(len(tokens), dtype=jnp.int32)
    pool = jnp.zeros(size, batch.pool.dtype)
    return backend.write(pool, jnp.array(tokens[:, 0::2]), jnp.array(tokens[:, 1::2]), slots)


def assert_same_pool(pool, expected):
    """Bit by bit, NaN included; but for the block that takes what belongs to padding."""
    pool, expected = (
        np.asarray(each)[SINK_BLOCK + 1 :].view(f"u{each.dtype.itemsize}")
        for each in (pool, expected)
    )
    np.testing.assert_array_equal(pool, expected)


def check(
    name,
    rows,
    shape,
    *,
    block_size=16,
    dtype="float32",
    pool_dtype=None,
    window=None,
    pad_rows=2,
    twice=False,
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
        window=window,
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
    backend = make_backend(name, shape)
    out, pool = write_and_attend(backend, batch, decode_only=decode_only, twice=twice, **options)
    out = out.astype(np.float64)
    expected = paged_attention_oracle(batch, **options)
    real = slice(batch.num_tokens)
    np.testing.assert_allclose(out[real], expected[real], atol=TOLERANCES[dtype], rtol=0)
    assert np.isfinite(out).all(), "rows of padding must be finite"
    assert_same_pool(pool, fill_pool(backend, batch))


def heads(group, head_dim, **options):
    return AttentionShape(num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, **options)
