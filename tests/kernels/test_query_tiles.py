"""How prefill cuts a batch into query tiles."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.paged_attention.triton_prefill import cut_query_tiles, query_tile_tokens
from pallas_kernels.paged_attention.triton_sizes import prefill_rows

NUM_ROWS, NUM_TOKENS = 6, 64


@given(
    num_decodes=st.integers(0, NUM_ROWS),
    chunk_lens=st.lists(st.integers(1, 30), max_size=NUM_ROWS),
    num_cached=st.integers(0, 50),
    tile_tokens=st.sampled_from([1, 4, 16, 128]),
)
def test_every_token_is_in_one_tile(num_decodes, chunk_lens, num_cached, tile_tokens):
    chunks = chunk_lens[: NUM_ROWS - num_decodes]
    while num_decodes + sum(chunks) > NUM_TOKENS:
        chunks.pop()
    query_lens = np.array([1] * num_decodes + chunks, np.int32)
    query_lens = np.pad(query_lens, (0, NUM_ROWS - len(query_lens)))
    contexts = np.where(query_lens > 0, query_lens + num_cached, 0).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    tiles = cut_query_tiles(
        jnp.array(starts),
        jnp.array(contexts),
        jnp.int32(num_decodes),
        num_tokens=NUM_TOKENS,
        tile_tokens=tile_tokens,
    )
    seen = []
    for row, first, count, end in zip(
        *map(np.asarray, (tiles.rows, tiles.tokens, tiles.counts, tiles.ends)), strict=True
    ):
        assert 0 <= count <= tile_tokens
        seen.extend(range(first, first + count))
        if count and row < NUM_ROWS:
            assert starts[row] <= first and first + count <= starts[row + 1]
            assert end == contexts[row] - (starts[row + 1] - first - count)
        elif count:
            assert end == 0, "tokens of padding see nothing"
    assert sorted(seen) == list(range(num_decodes, NUM_TOKENS))


@pytest.mark.parametrize(
    "group,head_dim,expected",
    [(1, 64, 128), (3, 128, 32), (4, 256, 16), (8, 128, 16), (130, 64, 1)],
)
def test_tiles_hold_as_many_tokens_as_rows_allow(group, head_dim, expected):
    assert query_tile_tokens(group, prefill_rows(head_dim)) == expected
