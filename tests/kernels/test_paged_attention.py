"""All backends against float64 numpy, with NaN in every slot that must not be read.

Kernels run as plain XLA here, in Pallas' interpret mode.
"""

import pytest

from pallas_kernels.paged_attention import NO_WINDOW
from pallas_kernels.testing import AttentionShape
from tests.kernels.checks import (
    BLOCKS_AND_HEADS,
    DECODES,
    GROUPS,
    MIXED,
    PREFILLS,
    check,
    heads,
)

BACKENDS = ["xla", "triton", pytest.param("pallas-tpu", marks=pytest.mark.long)]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "block_size,group,head_dim",
    [
        (8, 1, 64),
        (16, 3, 20),
        (16, 4, 256),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(16, 3, 80), (32, 4, 96), (128, 8, 128)]
        ),
    ],
)
@pytest.mark.parametrize("rows", [DECODES, PREFILLS], ids=["decodes", "prefills"])
def test_lengths(name, rows, block_size, group, head_dim):
    """O-02: lengths that are no multiple of a block or tile; fewer queries than keys."""
    check(name, rows, heads(group, head_dim), block_size=block_size, twice=True)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_mixed_batch(name, block_size):
    """O-01: every row reads its own blocks, whatever its neighbours' lengths."""
    check(name, MIXED, heads(3, 16), block_size=block_size)


@pytest.mark.parametrize("name", BACKENDS)
def test_bfloat16(name):
    check(name, MIXED, heads(4, 64), dtype="bfloat16")


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["xla", "triton"])
def test_float16(name):
    """TPUs do not have it."""
    check(name, MIXED, heads(4, 64), dtype="float16")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "dtype,pool_dtype",
    [
        ("float32", "int8"),
        ("bfloat16", "float8_e5m2"),
        ("float32", "float8_e4m3fn"),
        *(
            pytest.param(*types, marks=pytest.mark.long)
            for types in [
                ("bfloat16", "int8"),
                ("float32", "float8_e5m2"),
                ("bfloat16", "float8_e4m3fn"),
            ]
        ),
    ],
)
def test_pools_of_one_byte(name, dtype, pool_dtype):
    shape = heads(4, 80, has_sinks=True)
    types = {"dtype": dtype, "pool_dtype": pool_dtype}
    check(name, MIXED, shape, block_size=32, window=60, **types)
    check(name, DECODES, heads(2, 64), block_size=32, **types)


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


@pytest.mark.smoke
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
@pytest.mark.parametrize("case,block_size,head_dim", BLOCKS_AND_HEADS)
def test_full_matrix(case, block_size, head_dim):
    """Every two values of block size, group, head dimension and options meet, with all lengths.

    The TPU kernels have a matrix of their own, which also finds races.
    """
    name = "triton"
    rows, groups = [*DECODES, *PREFILLS], GROUPS[case % 4 :] + GROUPS
    check(name, rows, heads(groups[0], head_dim), block_size=block_size)
    with_options = heads(groups[1], head_dim, softcap=3.0, has_sinks=True)
    dtype = ["float32", "bfloat16", "float16"][case % 3]
    check(name, rows, with_options, block_size=block_size, dtype=dtype, window=50)
