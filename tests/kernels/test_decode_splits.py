"""How decode shares out its work, and what it reads."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.triton_decode import (
    decode,
    decode_kv_bytes_read,
    split_bounds,
)
from pallas_kernels.paged_attention.triton_sizes import (
    MAX_SPLITS,
    WANTED_PROGRAMS,
    choose_num_splits,
    choose_sizes,
    decode_rows,
)
from pallas_kernels.paged_attention.triton_tiles import KernelShape
from pallas_kernels.testing import MODEL_SHAPES, AttentionShape, ragged_batch
from tests.kernels.oracle import paged_attention_oracle

ITEMSIZE = 2


def kernel_shape(model: AttentionShape, *, itemsize: int, window: int | None) -> KernelShape:
    sizes = choose_sizes(model.group, model.head_dim, itemsize)
    return KernelShape(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=16,
        tile=sizes.decode_tile,
        rows=decode_rows(model.group, model.head_dim),
        num_warps=sizes.decode_warps,
        num_stages=sizes.decode_stages,
        scale=1.0,
        softcap=None,
        has_window=window is not None,
        has_sinks=False,
    )


@pytest.mark.parametrize("num_splits", [1, 4, 64])
@pytest.mark.parametrize("window", [None, 1, 100, 4096])
def test_splits_cover_every_tile_once(num_splits, window):
    tile = 64
    for context_len in (1, 63, 64, 65, 128, 1000, 8191):
        bounds = [
            split_bounds(
                jnp.int32(context_len),
                None if window is None else jnp.int32(window),
                jnp.int32(split),
                num_splits,
                tile,
            )
            for split in range(num_splits)
        ]
        covered = [number for first, end in bounds for number in range(int(first), int(end))]
        first_seen = 0 if window is None else max(context_len - window, 0)
        assert covered == list(range(first_seen // tile, -(-context_len // tile))), context_len


def test_splits_keep_a_card_busy():
    assert choose_num_splits(num_programs=8, max_tiles=2048) == MAX_SPLITS
    assert choose_num_splits(num_programs=64 * 8, max_tiles=64) == 4
    assert choose_num_splits(num_programs=256 * 8, max_tiles=64) == 1
    assert choose_num_splits(num_programs=8, max_tiles=1) == 1, "no more splits than work"


@pytest.mark.parametrize("window", [None, 128, 4096])
@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_decode_reads_little_more_than_the_live_kv(name, window):
    model = MODEL_SHAPES[name]
    shape = kernel_shape(model, itemsize=ITEMSIZE, window=window)
    contexts = np.random.default_rng(0).integers(1, 4096, 64).astype(np.int32)
    live_tokens = np.minimum(contexts, window or contexts).sum()
    live = int(live_tokens) * 2 * model.num_kv_heads * model.head_dim * ITEMSIZE
    num_splits = choose_num_splits(64 * model.num_kv_heads, 4096 // shape.tile)
    read = decode_kv_bytes_read(
        jnp.array(contexts), shape=shape, itemsize=ITEMSIZE, num_splits=num_splits, window=window
    )
    assert live <= read <= 1.05 * live, read / live


@pytest.mark.parametrize("num_splits", [1, 2, 8, 64])
def test_any_number_of_splits_gives_the_answer(num_splits):
    model = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, has_sinks=True)
    random = np.random.default_rng(num_splits)
    rows = [(1, length) for length in (1, 64, 129, 1000, 2100)]
    batch = ragged_batch(random, rows, model, block_size=16, pad_tokens=2, window=1500)
    sinks = random.normal(size=6).astype(np.float32)
    shape = replace(
        kernel_shape(model, itemsize=4, window=1500), softcap=5.0, has_sinks=True, scale=0.5
    )
    out = decode(
        jnp.array(batch.query),
        jnp.array(batch.pool),
        jnp.array(batch.block_tables),
        jnp.array(batch.context_lens),
        (jnp.array([1500]), jnp.array(sinks)),
        shape=shape,
        wanted_programs=WANTED_PROGRAMS,
        num_splits=num_splits,
        interpret=True,
    )
    expected = paged_attention_oracle(batch, scale=0.5, window=1500, softcap=5.0, sinks=sinks)
    np.testing.assert_allclose(out, expected, atol=2e-5, rtol=0)
