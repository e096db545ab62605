"""All backends against float64 numpy, with NaN in every slot that must not be read.

Kernels run as plain XLA here, in Pallas' interpret mode.
"""

from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import NO_WINDOW, TritonPagedAttention, XlaPagedAttention
from pallas_kernels.testing import TOLERANCES, AttentionShape, ragged_batch
from tests.kernels.oracle import paged_attention_oracle

BACKENDS = ["xla", "triton"]
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
    if name == "xla":
        return XlaPagedAttention()
    return TritonPagedAttention(group=shape.group, head_dim=shape.head_dim, interpret=True)


def attend(backend, batch, *, decode_only, window=None, sinks=None, **options):
    """Twice, as the order of float additions must not change. The window is traced."""

    @jax.jit
    def run(query, pool, metadata, traced):
        plan = backend.plan(
            metadata,
            num_tokens=query.shape[0],
            block_size=pool.shape[1],
            decode_only=decode_only,
        )
        return backend.attend(query, pool, plan, **options, **traced)

    traced = {"window": window, "sinks": sinks, "kv_scales": batch.kv_scales}
    traced = {name: jnp.asarray(value) for name, value in traced.items() if value is not None}
    arrays = jnp.array(batch.query), jnp.array(batch.pool), batch.metadata, traced
    first, again = np.asarray(run(*arrays)), np.asarray(run(*arrays))
    np.testing.assert_array_equal(first, again)
    return first.astype(np.float64)


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
        window=window if name == "triton" else None,  # XLA reads what it then hides
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


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "block_size,group,head_dim",
    [
        (8, 1, 64),
        (16, 3, 20),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(16, 3, 80), (32, 4, 96), (128, 8, 128), (16, 4, 256)]
        ),
    ],
)
@pytest.mark.parametrize("rows", [DECODES, PREFILLS], ids=["decodes", "prefills"])
def test_lengths(name, rows, block_size, group, head_dim):
    """O-02: lengths that are no multiple of a block or tile; fewer queries than keys."""
    check(name, rows, heads(group, head_dim), block_size=block_size)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_mixed_batch(name, block_size):
    """O-01: every row reads its own blocks, whatever its neighbours' lengths."""
    check(name, MIXED, heads(3, 16), block_size=block_size)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_types(name, dtype):
    check(name, MIXED, heads(4, 64), dtype=dtype)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("pool_dtype", ["int8", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pools_of_one_byte(name, dtype, pool_dtype):
    shape = heads(4, 80, has_sinks=True)
    check(name, MIXED, shape, dtype=dtype, pool_dtype=pool_dtype, window=60)
    check(name, DECODES, heads(2, 64), dtype=dtype, pool_dtype=pool_dtype)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [1, 16, 100, NO_WINDOW])
def test_window(name, window):
    check(name, MIXED, heads(2, 32), window=window)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"has_sinks": True}, {"scale": 0.3, "softcap": 5.0, "has_sinks": True}],
    ids=["softcap", "sinks", "all"],
)
def test_options(name, rows, options):
    window = 40 if len(options) == 3 else None
    check(name, rows, heads(4, 32, **options), window=window)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_heads,num_kv_heads", [(1, 1), (71, 1), (130, 1), (5, 5)])
def test_numbers_of_heads(name, num_heads, num_kv_heads):
    """One KV head for all, more query heads of it than a program takes, and one for each."""
    shape = AttentionShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16)
    check(name, MIXED, shape)


def test_prefill_rows_may_hold_one_token():
    """A prompt's last chunk may be one token, which is no decode for the batch."""
    rows = [(1, 40), (3, 3), (1, 100), (2, 50)]
    for name in BACKENDS:
        check(name, rows, heads(2, 16))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rows", [[(1, 20), (4, 30)], [(1, 20)], [(5, 5)], []])
def test_batches_may_have_more_rows_than_tokens(name, rows):
    check(name, rows, heads(2, 16), pad_rows=12)


@pytest.mark.long
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_full_matrix(head_dim, block_size):
    rows = [*DECODES, *PREFILLS]
    for group, dtype in zip([1, 3, 4, 8], cycle(TOLERANCES), strict=False):
        check("triton", rows, heads(group, head_dim), block_size=block_size)
        with_options = heads(group, head_dim, softcap=3.0, has_sinks=True)
        check("triton", rows, with_options, block_size=block_size, dtype=dtype, window=50)
