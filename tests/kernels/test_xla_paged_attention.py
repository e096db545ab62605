"""The XLA path against float64 numpy, with NaN in every slot that must not be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import AttentionMetadata, XlaPagedAttention
from tests.kernels.oracle import paged_attention_oracle

BACKEND = XlaPagedAttention()


def ragged_case(rng, rows, *, block_size, num_kv_heads, group, head_dim, pad_rows=2, pad_tokens=3):
    """rows: (query_len, context_len) of each sequence, decodes first. Blocks are out of order."""
    blocks_per_row = [-(-context // block_size) for _, context in rows]
    num_table_blocks = max(blocks_per_row) + 1
    num_blocks = 1 + sum(blocks_per_row) + 2
    free = list(rng.permutation(np.arange(1, num_blocks)))
    pool = np.full((num_blocks, block_size, 2 * num_kv_heads, head_dim), np.nan, np.float32)
    tables = np.zeros((len(rows) + pad_rows, num_table_blocks), np.int32)
    for row, (_, context) in enumerate(rows):
        for column in range(blocks_per_row[row]):
            tables[row, column] = free.pop()
            written = min(block_size, context - column * block_size)
            shape = (written, 2 * num_kv_heads, head_dim)
            pool[tables[row, column], :written] = rng.normal(size=shape)
    query_lens = [query for query, _ in rows] + [0] * pad_rows
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    contexts = np.array([context for _, context in rows] + [0] * pad_rows, np.int32)
    num_tokens = int(starts[-1]) + pad_tokens
    query = rng.normal(size=(num_tokens, num_kv_heads * group, head_dim)).astype(np.float32)
    return query, pool, tables, contexts, starts


def attend(query, pool, tables, contexts, starts, *, num_decodes, scale, decode_only=False):
    @jax.jit
    def run(query, pool, metadata):
        plan = BACKEND.plan(metadata, block_size=pool.shape[1], decode_only=decode_only)
        return BACKEND.attend(query, pool, plan, scale=scale)

    metadata = AttentionMetadata(
        jnp.array(tables), jnp.array(contexts), jnp.array(starts), jnp.int32(num_decodes)
    )
    return np.asarray(run(jnp.array(query), jnp.array(pool), metadata))


def check(rng, rows, *, decode_only=False, **shape):
    query, pool, tables, contexts, starts = ragged_case(rng, rows, **shape)
    num_decodes = sum(1 for query_len, _ in rows if query_len == 1)
    scale = shape["head_dim"] ** -0.5
    kwargs = {"num_decodes": num_decodes, "scale": scale, "decode_only": decode_only}
    first = attend(query, pool, tables, contexts, starts, **kwargs)
    again = attend(query, pool, tables, contexts, starts, **kwargs)
    expected = paged_attention_oracle(query, pool, tables, contexts, starts, scale=scale)
    num_real = starts[-1]
    np.testing.assert_allclose(first[:num_real], expected[:num_real], atol=2e-5)
    assert np.isfinite(first).all(), "rows of padding must be finite"
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("kv_len", [1, 7, 15, 16, 17, 31, 33, 192])
@pytest.mark.parametrize("group,head_dim", [(1, 16), (4, 64), (3, 20)])
def test_one_sequence_of_any_length(kv_len, group, head_dim):
    """O-02: lengths that are no multiple of a block or tile; fewer queries than keys."""
    rng = np.random.default_rng(kv_len)
    for query_len in sorted({1, min(5, kv_len), kv_len}):
        check(
            rng,
            [(query_len, kv_len)],
            block_size=16,
            num_kv_heads=2,
            group=group,
            head_dim=head_dim,
        )


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_mixed_batch(block_size):
    """O-01: every row reads its own blocks, whatever its neighbours' lengths."""
    rng = np.random.default_rng(block_size)
    rows = [(1, 5), (1, 16), (1, 300), (1, 33), (17, 17), (70, 200), (5, 1025), (64, 64)]
    check(rng, rows, block_size=block_size, num_kv_heads=2, group=3, head_dim=16)


def test_decodes_only():
    rng = np.random.default_rng(0)
    rows = [(1, int(length)) for length in rng.integers(1, 400, 37)]
    check(
        rng,
        rows,
        block_size=16,
        num_kv_heads=2,
        group=4,
        head_dim=16,
        decode_only=True,
        pad_tokens=2,
    )


def test_write_changes_only_its_slots():
    rng = np.random.default_rng(0)
    pool = rng.normal(size=(4, 8, 4, 16)).astype(np.float32)
    key, value = rng.normal(size=(2, 3, 2, 16)).astype(np.float32)
    slots = np.array([9, 31, 0], np.int32)
    written = np.asarray(
        BACKEND.write(jnp.array(pool), jnp.array(key), jnp.array(value), jnp.array(slots))
    )
    expected = pool.reshape(32, 4, 16).copy()
    expected[slots, 0::2], expected[slots, 1::2] = key, value
    np.testing.assert_array_equal(written.reshape(32, 4, 16), expected)
