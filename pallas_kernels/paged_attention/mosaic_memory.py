"""Vector memory of a TPU that the kernel takes."""

import math
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.head_major_pool import LANES
from pallas_kernels.paged_attention.mosaic_refs import MosaicShape, heads_at_a_time


def tile_spec(shape: MosaicShape, rows: int, lanes: int) -> pl.BlockSpec:
    """Blocks of an array that has `rows` rows a token and KV head."""
    if shape.tile_tokens == 1:
        size = (None, shape.num_kv_heads, rows, lanes)
        return pl.BlockSpec(size, lambda item, rows, tiles, *_: (tiles[item], 0, 0, 0))
    size = (shape.num_kv_heads, shape.tile_tokens * rows, lanes)
    return pl.BlockSpec(size, lambda item, rows, tiles, *_: (0, tiles[item], 0))


def scratch_shapes(shape: MosaicShape, pool_dtype: jnp.dtype) -> list[Any]:
    heads, rows = shape.num_kv_heads, shape.rows
    block = (heads, shape.block_size, 2 * shape.width)
    scratch = [
        pltpu.VMEM((2, shape.fetch_blocks, *block), pool_dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((heads, rows, LANES), jnp.float32),
        pltpu.VMEM((heads, rows, LANES), jnp.float32),
        pltpu.VMEM((heads, rows, shape.lanes), jnp.float32),
        pltpu.SMEM((1,), jnp.int32),
    ]
    if shape.band_rows:
        scratch.append(pltpu.VMEM((heads, shape.staged_rows, 2 * shape.width), pool_dtype))
        scratch.append(pltpu.SemaphoreType.DMA((1,)))
    return scratch


def kernel_vmem_bytes(shape: MosaicShape, pool_dtype: jnp.dtype) -> int:
    """Estimate the bytes that the kernel takes, rather a little too many than too few.

    Tiles of queries, answers and new K/V are there twice, as the next one comes while one is
    computed with. The compiler puts aside scores and weighted sums of the heads that it works on
    at a time.
    """
    word = jnp.dtype("float32").itemsize
    scratch = scratch_shapes(shape, pool_dtype)
    in_vmem = [each for each in scratch if each.memory_space == pltpu.VMEM]
    own = sum(math.prod(each.shape) * jnp.dtype(each.dtype).itemsize for each in in_vmem)
    tile = 2 * shape.rows * shape.lanes + 2 * shape.tile_tokens * shape.width
    tiles = 2 * shape.num_kv_heads * tile * max(pool_dtype.itemsize, 2)
    num_keys = shape.chunk_blocks * shape.block_size
    aside = heads_at_a_time(shape.num_kv_heads) * shape.rows * (num_keys + shape.lanes) * word
    return own + tiles + aside
