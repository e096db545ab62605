"""How the TPU kernel writes the K/V of its own queries into the pool, while it computes.

The rows of a block that a register holds, a band, are the least that DMA can move. The band that
new tokens belong to is among the blocks that their attention needs, so it has just been read: new
tokens replace their slots in it, for the attention to see, and the band goes back to the pool.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from pallas_kernels.paged_attention.mosaic_refs import BlockRange, MosaicShape, Refs, for_each_head


def stage_new(refs: Refs, item: Array, shape: MosaicShape) -> None:
    """Put the item's new K/V where they lie in their bands. Other staged rows have no meaning."""
    if shape.tile_tokens == 1:
        new = refs.new_kv[...].astype(refs.staged.dtype)
        refs.staged[...] = jnp.broadcast_to(new, refs.staged.shape)
        return
    band, num_rows = shape.band_rows, shape.staged_rows - shape.band_rows
    first = refs.ends[item] - refs.counts[item]
    shift = lax.rem(lax.rem(first, band) + num_rows - refs.tokens[item], num_rows)

    def stage(head: Array | int) -> None:
        new = refs.new_kv[head].astype(jnp.float32)  # narrower numbers cannot be rotated
        if num_rows > shape.tile_tokens:
            rest = jnp.zeros((num_rows - shape.tile_tokens, new.shape[1]), new.dtype)
            new = jnp.concatenate([new, rest])
        rotated = pltpu.roll(new, shift, axis=0).astype(refs.staged.dtype)
        refs.staged[head, :num_rows] = rotated
        refs.staged[head, num_rows:] = rotated[:band]

    for_each_head(shape.num_kv_heads, stage)


def start_writing(
    refs: Refs, fetched: BlockRange, item: Array, buffer: Array, shape: MosaicShape
) -> None:
    """Merge the new K/V of the fetched blocks into the buffer, and start writing to the pool."""
    end = refs.ends[item]
    first = end - refs.counts[item]

    def write(band: Array, start: Array) -> None:
        block, rows = start // shape.block_size, _rows_of(start, shape)
        staged = pl.ds(pl.multiple_of(band * shape.band_rows, shape.band_rows), shape.band_rows)

        def merge(head: Array | int) -> None:
            old = refs.buffers[buffer, block - fetched.first, head, rows]
            positions = start + lax.broadcasted_iota(jnp.int32, old.shape, 0)
            is_new = (positions >= first) & (positions < end)
            merged = jnp.where(is_new, refs.staged[head, staged], old)
            refs.buffers[buffer, block - fetched.first, head, rows] = merged
            refs.staged[head, staged] = merged

        for_each_head(shape.num_kv_heads, merge)
        target = refs.pool.at[refs.table[0, 0, block], :, rows]
        pltpu.make_async_copy(refs.staged.at[:, staged], target, refs.departures.at[0]).start()

    _for_each_band(refs, fetched, item, shape, write)


def wait_for_writes(refs: Refs, fetched: BlockRange, item: Array, shape: MosaicShape) -> None:
    def wait(band: Array, start: Array) -> None:
        rows = pl.ds(0, shape.band_rows)  # all bands have the same size
        source, target = refs.staged.at[:, rows], refs.pool.at[0, :, rows]
        pltpu.make_async_copy(source, target, refs.departures.at[0]).wait()

    _for_each_band(refs, fetched, item, shape, wait)


def _for_each_band(
    refs: Refs,
    fetched: BlockRange,
    item: Array,
    shape: MosaicShape,
    body: Callable[[Array, Array], None],
) -> None:
    """Call `body(band, its first position)` for each band with new tokens in these blocks."""
    size, band_rows = shape.block_size, shape.band_rows
    end = refs.ends[item]
    origin = (end - refs.counts[item]) // band_rows * band_rows
    start = jnp.maximum(origin, fetched.first * size)
    stop = jnp.minimum(end, (fetched.first + fetched.count) * size)
    first, last = (start - origin) // band_rows, pl.cdiv(stop - origin, band_rows)

    def step(band: Array, _: None) -> None:
        body(band, origin + band * band_rows)

    lax.fori_loop(first, jnp.maximum(last, first), step, None)


def _rows_of(position: Array, shape: MosaicShape) -> Any:
    start = lax.rem(position, shape.block_size)
    return pl.ds(pl.multiple_of(start, shape.band_rows), shape.band_rows)
