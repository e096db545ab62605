"""Attention of several neighbouring tokens of a sequence over all that precede them.

The batch is cut into query tiles, none of which holds tokens of two sequences. A program takes one
query tile and the query heads that share a KV head (Dao 2023, FlashAttention-2).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.sizes import power_of_two_from
from pallas_kernels.paged_attention.triton_tiles import (
    KernelShape,
    PagedSequence,
    ceil_div,
    dot_dtype,
    first_visible,
    softmax_over_tiles,
    split_options,
)
from pallas_kernels.triton_lowering import load, store, triton_call


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QueryTiles:
    """Tile i holds the tokens [tokens[i], tokens[i] + counts[i]) of the batch, of row rows[i].

    ends: context tokens up to and including the tile's last one; 0 where tokens are padding.
    Behind the last tile, counts are 0.
    """

    rows: Int[Array, "Q"]
    tokens: Int[Array, "Q"]
    counts: Int[Array, "Q"]
    ends: Int[Array, "Q"]


def cut_query_tiles(
    query_starts: Int[Array, "S1"],
    context_lens: Int[Array, "S"],
    num_decodes: Int[Array, ""],
    *,
    num_tokens: int,
    tile_tokens: int,
) -> QueryTiles:
    """Cut all tokens behind the decodes into tiles, tokens of padding included."""
    num_rows = context_lens.shape[0]
    # One more row holds the tokens of padding, which have no context.
    starts, ends = query_starts, jnp.append(query_starts[1:], jnp.int32(num_tokens))
    contexts = jnp.append(context_lens, 0)
    row_numbers = jnp.arange(num_rows + 1, dtype=jnp.int32)
    row_tiles = jnp.where(row_numbers < num_decodes, 0, -(-(ends - starts) // tile_tokens))
    last_tiles = jnp.cumsum(row_tiles)
    first_tiles = last_tiles - row_tiles

    tiles = jnp.arange(max_query_tiles(num_tokens, num_rows, tile_tokens), dtype=jnp.int32)
    # A row is found by comparing with all: a binary search would be a loop on the device.
    rows = (last_tiles[None, :] <= tiles[:, None]).sum(axis=1, dtype=jnp.int32)
    rows, is_used = jnp.minimum(rows, num_rows), rows <= num_rows
    tokens = starts[rows] + (tiles - first_tiles[rows]) * tile_tokens
    counts = jnp.where(is_used, jnp.minimum(ends[rows] - tokens, tile_tokens), 0)
    # In:  tokens 7..11 of the batch end a row of context 20; a tile has 2 of them.
    # Out: its tiles end at 20 - (12 - 9) = 17, 19 and 20.
    tile_ends = contexts[rows] - (ends[rows] - tokens - counts)
    return QueryTiles(rows, tokens, counts, jnp.where(rows < num_rows, tile_ends, 0))


def max_query_tiles(num_tokens: int, num_rows: int, tile_tokens: int) -> int:
    """Largest number of tiles, however the tokens are shared out over the rows.

    A row of n tokens has at most (n - 1) / tile + 1.
    """
    most_rows = min(num_rows + 1, num_tokens)
    return (num_tokens - most_rows) // tile_tokens + most_rows


def tile_heads(group: int, rows: int) -> int:
    """Query heads of a KV head that a program takes, a power of two."""
    return min(power_of_two_from(group), rows)


def query_tile_tokens(group: int, rows: int) -> int:
    return rows // tile_heads(group, rows)


def prefill(
    query: Float[Array, "T H D"],
    pool: Num[Array, "N B K2 D"],
    block_tables: Int[Array, "S M"],
    tiles: QueryTiles,
    decoded: Float[Array, "T H D"],
    options: tuple[Array, ...],
    *,
    shape: KernelShape,
    interpret: bool,
) -> Float[Array, "T H D"]:
    """Overwrite the tokens of all tiles in `decoded`, in place.

    options: the options of `OptionRefs` that `shape` has.
    """
    num_chunks = -(-shape.group // tile_heads(shape.group, shape.rows))
    inputs = (query, pool, block_tables, tiles.rows, tiles.tokens, tiles.counts, tiles.ends)
    attend = triton_call(
        partial(_prefill_kernel, shape=shape),
        name="paged_prefill",
        grid=(tiles.rows.shape[0], shape.num_kv_heads * num_chunks),
        out_shape=[jax.ShapeDtypeStruct(query.shape, query.dtype)],
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        aliases={len(inputs) + len(options): 0},
        interpret=interpret,
    )
    return attend(*inputs, *options, decoded)[0]


def _prefill_kernel(*refs: Any, shape: KernelShape) -> None:
    query_ref, pool_ref, tables_ref, *tile_refs = refs[:7]
    options, (_, out_ref) = split_options(refs[7:], shape)
    tile, num_heads = pl.program_id(0), tile_heads(shape.group, shape.rows)
    num_chunks = -(-shape.group // num_heads)
    kv_head, chunk = pl.program_id(1) // num_chunks, pl.program_id(1) % num_chunks
    row, first_token, count, end = (ref[tile] for ref in tile_refs)
    window = options.read_window()

    # Row r of the matmul is head r % num_heads of token r // num_heads.
    rows = jnp.arange(shape.rows, dtype=jnp.int32)
    tokens = lax.div(rows, jnp.int32(num_heads))
    in_group = chunk * num_heads + lax.rem(rows, jnp.int32(num_heads))
    heads = kv_head * shape.group + in_group
    dims = jnp.arange(shape.width, dtype=jnp.int32)
    is_row = (tokens < count) & (in_group < shape.group)
    mask = is_row[:, None] & (dims < shape.head_dim)[None, :]

    @pl.when(count > 0)
    def _():
        where = ((first_token + tokens)[:, None], heads[:, None], dims[None, :])
        query = load(query_ref.at[where], mask=mask, other=0)
        query = query.astype(dot_dtype(query_ref, pool_ref))
        positions = end - count + tokens
        first_positions = first_visible(positions, window)

        def is_visible(key_positions: Array) -> Array:
            visible = key_positions[None, :] <= positions[:, None]
            if window is None:
                return visible
            return visible & (key_positions[None, :] >= first_positions[:, None])

        first = first_visible(end - count, window)
        scales = options.read_kv_scales(kv_head)
        sequence = PagedSequence(pool_ref, tables_ref, row, kv_head, first, end, scales, shape)
        first_tile = first // shape.tile
        softmax = softmax_over_tiles(
            query, sequence, first_tile, ceil_div(end, shape.tile), is_visible
        )
        out = softmax.normalised(options.read_sinks(heads, is_row))
        store(out_ref.at[where], out.astype(out_ref.dtype), mask=mask)
