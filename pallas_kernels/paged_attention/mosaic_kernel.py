"""The TPU kernel of paged attention, in Pallas through Mosaic.

A step of the grid is one work item. K/V blocks of all heads come by DMA into two buffers in turn:
while one is computed with, the next one fills, across the borders of items as well.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.api import MASKED
from pallas_kernels.paged_attention.head_major_pool import LANES
from pallas_kernels.paged_attention.mosaic_items import WorkItems
from pallas_kernels.paged_attention.mosaic_memory import scratch_shapes, tile_spec
from pallas_kernels.paged_attention.mosaic_refs import (
    BlockRange,
    MosaicShape,
    Refs,
    for_each_head,
    name_refs,
)
from pallas_kernels.paged_attention.mosaic_write import stage_new, start_writing, wait_for_writes


def attend_items(
    query: Float[Array, "..."],
    new_kv: Float[Array, "..."] | None,
    pool: Num[Array, "N K B W2"],
    block_tables: Int[Array, "S M"],
    items: WorkItems,
    *,
    options: dict[str, Array],
    shape: MosaicShape,
    interpret: Any,
) -> tuple[Float[Array, "..."], Num[Array, "N K B W2"]]:
    """Attend with all work items. Returns the answers and the pool.

    The K/V of the items' tokens are written to the pool if `new_kv` is given.

    query, and the output: [T, K, G, lanes] for decodes, else [K, T * G, lanes].
    new_kv: [T, K, 1, 2W] for decodes, else [K, T, 2W]; numbers that the pool's type has.
    options: window, sinks, kv_scales.

    Tokens of no item get no meaningful output.
    """
    num_items = items.rows.shape[0]
    scalars = [items.rows, items.tiles, items.tokens, items.counts, items.ends]
    scalars += [options[name] for name in ("window", "kv_scales") if name in options]
    queries = tile_spec(shape, shape.group, shape.lanes)
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    inputs, in_specs = [query], [queries]
    if shape.has_sinks:
        inputs.append(_row_sinks(options["sinks"], shape))
        in_specs.append(pl.BlockSpec(inputs[-1].shape, lambda *_: (0, 0, 0)))
    if new_kv is not None:
        inputs.append(new_kv)
        in_specs.append(tile_spec(shape, 1, 2 * shape.width))
    inputs += [block_tables[:, None, :]] * 2 + [pool]
    num_columns = block_tables.shape[1]
    in_specs += [_table_spec(distance, num_items, num_columns) for distance in (0, 1)] + [in_memory]
    outputs, out_specs, aliases = [query], [queries], {}
    if new_kv is not None:
        outputs.append(pool)
        out_specs.append(in_memory)
        aliases[len(scalars) + len(inputs) - 1] = 1
    call = pl.pallas_call(
        partial(_attention_kernel, shape=shape),
        name="paged_decode" if shape.tile_tokens == 1 else "paged_prefill",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_items,),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch_shapes(shape, pool.dtype),
        ),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in outputs],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=shape.vmem_limit
        ),
        interpret=interpret,
    )
    out, *written = call(*scalars, *inputs)
    return out, written[0] if written else pool


def _table_spec(distance: int, num_items: int, num_table_blocks: int) -> pl.BlockSpec:
    """Let a grid step read the block table of the work item `distance` steps ahead."""

    def row_of(item: Array, rows: Any, *_: Any) -> tuple[Any, int, int]:
        return rows[jnp.minimum(item + distance, num_items - 1)], 0, 0

    return pl.BlockSpec((1, 1, num_table_blocks), row_of, memory_space=pltpu.SMEM)


def _row_sinks(sinks: Float[Array, "H"], shape: MosaicShape) -> Float[Array, "K R 1"]:
    sinks = sinks.astype(jnp.float32).reshape(shape.num_kv_heads, shape.group)
    return jnp.tile(sinks, (1, shape.tile_tokens))[:, :, None]


def _attention_kernel(*arguments: Any, shape: MosaicShape) -> None:
    refs = name_refs(arguments, shape)
    item = pl.program_id(0)
    last_item = pl.num_programs(0) - 1
    next_item = jnp.minimum(item + 1, last_item)

    @pl.when(item == 0)
    def _():
        refs.buffer[0] = 0
        # Matmuls go over whole chunks, and a weight of zero does not make up for a NaN.
        refs.buffers[...] = jnp.zeros_like(refs.buffers)

    @pl.when(refs.ends[item] > 0)
    def _():
        blocks = _visible_blocks(refs, item, shape)
        has_next = (item < last_item) & (refs.ends[next_item] > 0)
        is_fetched = (item > 0) & (refs.ends[jnp.maximum(item - 1, 0)] > 0)

        @pl.when(jnp.logical_not(is_fetched))
        def _():
            _start_copies(refs, refs.table, _fetch_range(blocks, 0, shape), refs.buffer[0])

        _reset_softmax(refs, shape)
        if shape.band_rows:
            stage_new(refs, item, shape)
        num_fetches = pl.cdiv(blocks.count, shape.fetch_blocks)

        must_wait = has_next & _reads_what_is_written(refs, item, next_item, shape)

        def step(fetch: Array, buffer: Array) -> Array:
            is_last = fetch + 1 == num_fetches

            def fetch_for_next_item() -> None:
                following = _fetch_range(_visible_blocks(refs, next_item, shape), 0, shape)
                _start_copies(refs, refs.next_table, following, 1 - buffer)

            @pl.when(jnp.logical_not(is_last))
            def _():
                following = _fetch_range(blocks, fetch + 1, shape)
                _start_copies(refs, refs.table, following, 1 - buffer)

            pl.when(is_last & has_next & jnp.logical_not(must_wait))(fetch_for_next_item)
            fetched = _fetch_range(blocks, fetch, shape)
            _wait_for_copies(refs, fetched, buffer, shape)
            if shape.band_rows:
                start_writing(refs, fetched, item, buffer, shape)
            _clear_invisible(refs, fetched, item, buffer, shape)
            _attend_buffer(refs, fetched, item, buffer, shape)
            if shape.band_rows:
                wait_for_writes(refs, fetched, item, shape)
            pl.when(is_last & must_wait)(fetch_for_next_item)
            return 1 - buffer

        refs.buffer[0] = lax.fori_loop(0, num_fetches, step, refs.buffer[0])
        _store_output(refs, item, shape)


def _reads_what_is_written(
    refs: Refs, item: Array, next_item: Array, shape: MosaicShape
) -> Array | bool:
    """Whether the next item's first blocks get K/V of this one. Blocks of other rows never do."""
    if not shape.band_rows or shape.tile_tokens == 1:
        return jnp.bool_(False)
    first, count = _fetch_range(_visible_blocks(refs, next_item, shape), 0, shape)
    first_written = (refs.ends[item] - refs.counts[item]) // shape.block_size
    return (refs.rows[item] == refs.rows[next_item]) & (first + count > first_written)


def _first_visible(refs: Refs, position: Array, shape: MosaicShape) -> Array:
    return jnp.maximum(position - refs.window[0] + 1, 0) if shape.has_window else position * 0


def _visible_blocks(refs: Refs, item: Array, shape: MosaicShape) -> BlockRange:
    end = refs.ends[item]
    first = _first_visible(refs, end - refs.counts[item], shape) // shape.block_size
    return BlockRange(first, pl.cdiv(end, shape.block_size) - first)


def _fetch_range(blocks: BlockRange, fetch: Array | int, shape: MosaicShape) -> BlockRange:
    """Blocks that one fetch brings into a buffer."""
    skipped = fetch * shape.fetch_blocks
    return BlockRange(
        blocks.first + skipped, jnp.minimum(blocks.count - skipped, shape.fetch_blocks)
    )


def _start_copies(refs: Refs, table: Any, blocks: BlockRange, buffer: Array) -> None:
    def start(index: Array, _: None) -> None:
        source = refs.pool.at[table[0, 0, blocks.first + index]]
        target = refs.buffers.at[buffer, index]
        pltpu.make_async_copy(source, target, refs.arrivals.at[buffer]).start()

    lax.fori_loop(0, blocks.count, start, None)


def _wait_for_copies(refs: Refs, blocks: BlockRange, buffer: Array, shape: MosaicShape) -> None:
    """Wait for the blocks of a buffer. A semaphore counts bytes: one wait does for a full one."""
    arrival = refs.arrivals.at[buffer]

    @pl.when(blocks.count == shape.fetch_blocks)
    def _():
        full = refs.buffers.at[buffer]
        pltpu.make_async_copy(full, full, arrival).wait()

    @pl.when(blocks.count < shape.fetch_blocks)
    def _():
        def wait(index: Array, _: None) -> None:
            pltpu.make_async_copy(refs.pool.at[0], refs.buffers.at[buffer, index], arrival).wait()

        lax.fori_loop(0, blocks.count, wait, None)


def _clear_invisible(
    refs: Refs, fetched: BlockRange, item: Array, buffer: Array, shape: MosaicShape
) -> None:
    """Zero the slots of the first and the last block that no token sees: they may be NaN."""
    size = shape.block_size
    end = refs.ends[item] - fetched.first * size

    def clear(block: Array | int, is_visible: Callable[[Array], Array]) -> None:
        ref = refs.buffers.at[buffer, block]
        values = ref[...]
        slots = block * size + lax.broadcasted_iota(jnp.int32, values.shape, 1)
        ref[...] = jnp.where(is_visible(slots), values, jnp.zeros_like(values))

    @pl.when(end < fetched.count * size)
    def _():
        clear(fetched.count - 1, lambda slots: slots < end)

    if shape.has_window:
        first_position = _first_visible(refs, refs.ends[item] - refs.counts[item], shape)
        first = first_position - fetched.first * size

        @pl.when(first > 0)
        def _():
            clear(0, lambda slots: slots >= first)


def _reset_softmax(refs: Refs, shape: MosaicShape) -> None:
    """Begin a softmax. A sink is a score that takes part from the start."""
    size = refs.maximum.shape
    if shape.has_sinks:
        refs.maximum[...] = jnp.broadcast_to(refs.sinks[...], size)
        refs.denominator[...] = jnp.ones(size, jnp.float32)
    else:
        refs.maximum[...] = jnp.full(size, MASKED, jnp.float32)
        refs.denominator[...] = jnp.zeros(size, jnp.float32)
    refs.total[...] = jnp.zeros(refs.total.shape, jnp.float32)


def _query_positions(refs: Refs, item: Array, shape: MosaicShape) -> Array:
    """Position of each row's query in its sequence: [R, 1]; a scalar for a decode."""
    if shape.tile_tokens == 1:
        return refs.ends[item] - 1
    first = refs.ends[item] - refs.counts[item] - refs.tokens[item]
    return first + _row_tokens(shape)


def _row_tokens(shape: MosaicShape) -> Int[Array, "R 1"]:
    return lax.broadcasted_iota(jnp.int32, (shape.rows, 1), 0) // shape.group


def _attend_buffer(
    refs: Refs, fetched: BlockRange, item: Array, buffer: Array, shape: MosaicShape
) -> None:
    num_keys = shape.chunk_blocks * shape.block_size
    positions = _query_positions(refs, item, shape)

    def attend_chunk(chunk: Array, _: None) -> None:
        first_key = (fetched.first + chunk * shape.chunk_blocks) * shape.block_size
        keys = first_key + lax.broadcasted_iota(jnp.int32, (1, num_keys), 1)
        is_visible = keys <= positions
        if shape.has_window:
            is_visible &= keys > positions - refs.window[0]

        def attend(head: Array | int) -> None:
            where = pl.ds(chunk * shape.chunk_blocks, shape.chunk_blocks)
            pairs = refs.buffers[buffer, where, head]
            _attend_keys(refs, head, pairs.reshape(num_keys, 2 * shape.width), is_visible, shape)

        for_each_head(shape.num_kv_heads, attend)

    lax.fori_loop(0, pl.cdiv(fetched.count, shape.chunk_blocks), attend_chunk, None)


def _attend_keys(
    refs: Refs, head: Array | int, pairs: Num[Array, "C W2"], is_visible: Array, shape: MosaicShape
) -> None:
    """Online softmax (Milakov & Gimelshein 2018) in float32.

    Where a row sees nothing of its first keys it sums up values of no meaning, which the first key
    that it sees scales to zero.
    """
    query = refs.query[head]
    pairs = pairs.astype(query.dtype)
    key = value = pairs
    if shape.width >= LANES:
        key, value = pairs[:, : shape.width], pairs[:, shape.width :]
    scores = _matmul(query, key, contract=1) * shape.scale
    if shape.has_kv_scales:
        scores *= refs.kv_scales[2 * head]
    if shape.softcap is not None:
        scores = jnp.tanh(scores / shape.softcap) * shape.softcap
    scores = jnp.where(is_visible, scores, MASKED)

    old_maximum = refs.maximum[head][:, :1]
    maximum = jnp.maximum(old_maximum, scores.max(axis=1, keepdims=True))
    rescale = jnp.exp(old_maximum - maximum)
    weights = jnp.exp(scores - maximum)
    denominator = refs.denominator[head][:, :1] * rescale + weights.sum(axis=1, keepdims=True)
    weighted = _matmul(weights.astype(value.dtype), value, contract=0)
    refs.total[head] = refs.total[head] * rescale + weighted
    refs.maximum[head] = jnp.broadcast_to(maximum, (shape.rows, LANES))
    refs.denominator[head] = jnp.broadcast_to(denominator, (shape.rows, LANES))


def _matmul(left: Array, right: Array, *, contract: int) -> Float[Array, "I O"]:
    """Multiply into float32. contract: the axis of `right` that is summed over."""
    is_wide = left.dtype == jnp.float32
    return lax.dot_general(
        left,
        right,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if is_wide else None,
        preferred_element_type=jnp.float32,
    )


def _store_output(refs: Refs, item: Array, shape: MosaicShape) -> None:
    """Store the item's tokens. Items before it may have stored other tokens of the same tile."""
    before = jnp.maximum(item - 1, 0)
    is_first_of_tile = (item == 0) | (refs.tiles[before] != refs.tiles[item])
    tokens = _row_tokens(shape) - refs.tokens[item]
    is_mine = (tokens >= 0) & (tokens < refs.counts[item])

    def store(head: Array | int) -> None:
        out = refs.total[head] / jnp.maximum(refs.denominator[head][:, :1], 1e-30)
        if shape.has_kv_scales:
            out *= refs.kv_scales[2 * head + 1]
        out = out.astype(refs.out.dtype)
        if shape.tile_tokens > 1:
            others = jnp.where(is_first_of_tile, jnp.zeros_like(out), refs.out[head])
            out = jnp.where(is_mine, out, others)
        refs.out[head] = out

    for_each_head(shape.num_kv_heads, store)
