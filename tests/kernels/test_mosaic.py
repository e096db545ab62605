"""What the TPU kernels do differently, with races found out; see test_paged_attention.py also."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.mosaic_items import prefill_items
from pallas_kernels.testing import AttentionShape
from tests.kernels.checks import BLOCKS_AND_HEADS, DECODES, GROUPS, PREFILLS, check, heads

ROWS = [(1, 5), (1, 16), (1, 150), (1, 33), (17, 17), (30, 100), (5, 205), (3, 3), (40, 64)]


@pytest.mark.parametrize(
    "block_size,group,head_dim", [(8, 1, 64), (16, 3, 80), (32, 8, 128), (128, 2, 256)]
)
@pytest.mark.parametrize("copies", ["pallas-tpu", "pallas-tpu-races"], ids=["early", "late"])
def test_mixed_batch(block_size, group, head_dim, copies):
    """Tiles of queries with tokens of several rows; blocks that come in many pieces, or in one.
    Copies take effect as soon as they are started, or not before they are waited for."""
    check(copies, ROWS, heads(group, head_dim), block_size=block_size)


@pytest.mark.long
@pytest.mark.parametrize("case,block_size,head_dim", BLOCKS_AND_HEADS[::2])
def test_full_matrix(case, block_size, head_dim):
    """As for all backends, but with races found out, and shorter rows for that: looking for races
    takes the square of the number of copies. A third of the lengths for each case."""
    name, groups = "pallas-tpu-races", GROUPS[case % 4 :] + GROUPS
    rows = [row for row in [*DECODES, *PREFILLS] if row[1] < 1000]
    check(name, rows[case % 3 :: 3], heads(groups[0], head_dim), block_size=block_size)
    with_options = heads(groups[1], head_dim, softcap=3.0, has_sinks=True)
    rows = rows[(case + 1) % 3 :: 3]
    dtype = "float32" if case % 2 or block_size == 8 else "bfloat16"
    check(name, rows, with_options, block_size=block_size, dtype=dtype, window=50)


@pytest.mark.long
@pytest.mark.parametrize("block_size,query_len", [(8, 17), (16, 1), (32, 5), (128, 17), (128, 1)])
def test_long_rows(block_size, query_len):
    check("pallas-tpu-races", [(query_len, 1025)], heads(4, 80), block_size=block_size)


@pytest.mark.long
def test_long_prompt():
    check("pallas-tpu-races", [(1025, 1025)], heads(4, 128), block_size=128)


@pytest.mark.smoke
def test_decodes_only():
    check("pallas-tpu-races", [(1, 300), (1, 1), (1, 65), (1, 64), (1, 128)], heads(4, 128))


@pytest.mark.parametrize("window", [1, 40])
def test_all_options(window):
    shape = heads(3, 64, has_sinks=True, softcap=3.0, scale=0.2)
    check("pallas-tpu-races", ROWS, shape, dtype="bfloat16", window=window)


def test_one_kv_head():
    """The whole group of 20 heads is one matmul."""
    check("pallas-tpu-races", ROWS, AttentionShape(num_heads=20, num_kv_heads=1, head_dim=64))


def test_items_of_ragged_rows():
    """In: tiles of 4; tokens 0 and 1 are decodes; rows of 7 and 3 tokens; row 4 is padding."""
    items = prefill_items(
        jnp.array([0, 1, 2, 9, 12, 12]),
        jnp.array([5, 6, 20, 3, 0]),
        jnp.int32(2),
        num_tokens=16,
        tile_tokens=4,
    )
    is_used = np.asarray(items.ends) > 0
    columns = items.rows, items.tiles, items.tokens, items.counts, items.ends
    used = [tuple(map(int, item)) for item in np.stack(columns, axis=1)[is_used]]
    assert used == [(2, 0, 2, 2, 15), (2, 1, 0, 4, 19), (2, 2, 0, 1, 20), (3, 2, 1, 3, 3)]
    assert set(np.asarray(items.tiles)[~is_used]) == {2}
