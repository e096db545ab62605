"""Attention of one token a sequence: split-KV (Dao et al. 2023, Flash-Decoding).

A program takes the query heads that share a KV head, and one of the splits of a sequence's tiles:
few sequences keep a whole card busy. With more than one split the programs leave partial sums in
float32, which a second kernel adds up.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.api import MASKED
from pallas_kernels.paged_attention.triton_sizes import MIN_SPLIT_TILES, choose_num_splits
from pallas_kernels.paged_attention.triton_tiles import (
    LOG2_E,
    KernelShape,
    PagedSequence,
    SoftmaxSum,
    ceil_div,
    dot_dtype,
    first_visible,
    softmax_over_tiles,
    split_options,
)
from pallas_kernels.triton_lowering import load, store, triton_call

BLOCK_NUMBER_BYTES = 4


def split_bounds(
    context_len: Array, window: Array | None, split: Array, num_splits: int, tile: int
) -> tuple[Array, Array]:
    """The tiles [first, end) of a split; none if the splits before it take all."""
    first_tile = first_visible(context_len - 1, window) // tile
    end_tile = ceil_div(context_len, tile)
    per_split = jnp.maximum(ceil_div(end_tile - first_tile, num_splits), MIN_SPLIT_TILES)
    first = first_tile + split * per_split
    return first, jnp.minimum(first + per_split, end_tile)


def decode(
    query: Float[Array, "T H D"],
    pool: Num[Array, "N B K2 D"],
    block_tables: Int[Array, "S M"],
    context_lens: Int[Array, "S"],
    options: tuple[Array, ...],
    *,
    shape: KernelShape,
    wanted_programs: int,
    interpret: bool,
    num_splits: int | None = None,
) -> Float[Array, "T H D"]:
    """Let row s attend with token s; rows of length 0 get zeros, and tokens from S on nothing.

    options: the options of `OptionRefs` that `shape` has.
    wanted_programs: decide the number of splits if it is None.
    """
    num_rows = min(query.shape[0], context_lens.shape[0])
    num_head_programs = shape.num_kv_heads * num_head_chunks(shape)
    if num_splits is None:
        max_tiles = -(-block_tables.shape[1] * shape.block_size // shape.tile)
        num_splits = choose_num_splits(num_rows * num_head_programs, max_tiles, wanted_programs)
    partials = (
        jax.ShapeDtypeStruct((num_rows, num_splits, shape.num_heads), jnp.float32),
        jax.ShapeDtypeStruct((num_rows, num_splits, shape.num_heads), jnp.float32),
        jax.ShapeDtypeStruct((num_rows, num_splits, shape.num_heads, shape.head_dim), jnp.float32),
    )
    out_shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
    attend = triton_call(
        partial(_decode_kernel, shape=shape, num_splits=num_splits),
        name="paged_decode",
        grid=(num_rows, num_head_programs, num_splits),
        out_shape=[out_shape] if num_splits == 1 else partials,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        interpret=interpret,
    )
    outputs = attend(query, pool, block_tables, context_lens, *options)
    if num_splits == 1:
        return outputs[0]
    reduce = triton_call(
        partial(_reduce_kernel, shape=shape, num_splits=num_splits),
        name="paged_decode_reduce",
        grid=(num_rows, shape.num_heads),
        out_shape=[out_shape],
        num_warps=shape.num_warps,
        interpret=interpret,
    )
    return reduce(*outputs, context_lens, *options)[0]


def num_head_chunks(shape: KernelShape) -> int:
    return -(-shape.group // shape.rows)


def decode_kv_bytes_read(
    context_lens: Int[Array, "S"],
    *,
    shape: KernelShape,
    itemsize: int,
    num_splits: int,
    window: int | None = None,
) -> int:
    """Count the bytes of K/V and block numbers that all programs read."""
    num_tokens = 0
    window_array = None if window is None else jnp.int32(window)
    first = first_visible(context_lens - 1, window_array)
    for split in range(num_splits):
        first_tile, end_tile = split_bounds(
            context_lens, window_array, jnp.int32(split), num_splits, shape.tile
        )
        starts = jnp.maximum(first_tile * shape.tile, first)
        ends = jnp.minimum(end_tile * shape.tile, context_lens)
        num_tokens += int(jnp.maximum(ends - starts, 0).sum())
    num_head_programs = shape.num_kv_heads * num_head_chunks(shape)
    token_bytes = 2 * shape.head_dim * itemsize + BLOCK_NUMBER_BYTES
    return num_tokens * num_head_programs * token_bytes


def _decode_kernel(*refs: Any, shape: KernelShape, num_splits: int) -> None:
    query_ref, pool_ref, tables_ref, lens_ref, *rest = refs
    options, outputs = split_options(rest, shape)
    row, split = pl.program_id(0), pl.program_id(2)
    kv_head, chunk = _divide(pl.program_id(1), num_head_chunks(shape))
    context_len = lens_ref[row]
    window = options.read_window()
    first_tile, end_tile = split_bounds(context_len, window, split, num_splits, shape.tile)

    in_group = chunk * shape.rows + jnp.arange(shape.rows, dtype=jnp.int32)
    heads = kv_head * shape.group + in_group
    dims = jnp.arange(shape.width, dtype=jnp.int32)
    is_head = in_group < shape.group
    mask = is_head[:, None] & (dims < shape.head_dim)[None, :]
    first = first_visible(context_len - 1, window)
    scales = options.read_kv_scales(kv_head)
    sequence = PagedSequence(pool_ref, tables_ref, row, kv_head, first, context_len, scales, shape)

    def is_visible(positions: Array) -> Array:
        return ((positions >= first) & (positions < context_len))[None, :]

    def attend() -> SoftmaxSum:
        query = load(query_ref.at[row, heads[:, None], dims[None, :]], mask=mask, other=0)
        query = query.astype(dot_dtype(query_ref, pool_ref))
        return softmax_over_tiles(query, sequence, first_tile, end_tile, is_visible)

    if num_splits == 1:
        out = attend().normalised(options.read_sinks(heads, is_head))
        target = outputs[0].at[row, heads[:, None], dims[None, :]]
        store(target, out.astype(outputs[0].dtype), mask=mask)
        return

    @pl.when(first_tile < end_tile)
    def _():
        maximum_ref, denominator_ref, total_ref = outputs
        softmax = attend()
        store(maximum_ref.at[row, split, heads], softmax.maximum, mask=is_head)
        store(denominator_ref.at[row, split, heads], softmax.denominator, mask=is_head)
        target = total_ref.at[row, split, heads[:, None], dims[None, :]]
        store(target, softmax.total, mask=mask)


def _reduce_kernel(*refs: Any, shape: KernelShape, num_splits: int) -> None:
    """Add up the splits of one query head. Nothing was stored for a split without tokens."""
    maximum_ref, denominator_ref, total_ref, lens_ref, *rest = refs
    options, (out_ref,) = split_options(rest, shape)
    row, head = pl.program_id(0), pl.program_id(1)
    window = options.read_window()
    splits = jnp.arange(num_splits, dtype=jnp.int32)
    first_tile, end_tile = split_bounds(lens_ref[row], window, splits, num_splits, shape.tile)
    is_used = first_tile < end_tile
    dims = jnp.arange(shape.width, dtype=jnp.int32)
    is_dim = dims < shape.head_dim

    maxima = load(maximum_ref.at[row, splits, head], mask=is_used, other=MASKED)
    denominators = load(denominator_ref.at[row, splits, head], mask=is_used, other=0)
    totals = load(
        total_ref.at[row, splits[:, None], head, dims[None, :]],
        mask=is_used[:, None] & is_dim[None, :],
        other=0,
    )
    maximum = maxima.max(axis=0)
    if options.sinks is not None:
        sink = options.sinks[head].astype(jnp.float32) * LOG2_E
        maximum = jnp.maximum(maximum, sink)
    rescale = jnp.exp2(maxima - maximum)
    denominator = (denominators * rescale).sum(axis=0)
    if options.sinks is not None:
        denominator += jnp.exp2(sink - maximum)
    total = (totals * rescale[:, None]).sum(axis=0)
    out = total / jnp.maximum(denominator, 1e-30)
    store(out_ref.at[row, head, dims], out.astype(out_ref.dtype), mask=is_dim)


def _divide(value: Array, divisor: int) -> tuple[Array, Array]:
    return value // divisor, value % divisor
