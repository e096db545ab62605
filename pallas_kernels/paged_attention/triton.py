"""Paged attention in Pallas kernels through Triton: the path of NVIDIA GPUs from A100 on."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.api import AttentionMetadata
from pallas_kernels.paged_attention.interleaved_pool import InterleavedPool
from pallas_kernels.paged_attention.triton_decode import decode
from pallas_kernels.paged_attention.triton_prefill import (
    QueryTiles,
    cut_query_tiles,
    prefill,
    query_tile_tokens,
)
from pallas_kernels.paged_attention.triton_sizes import (
    TritonSizes,
    choose_sizes,
    decode_rows,
    prefill_rows,
)
from pallas_kernels.paged_attention.triton_tiles import KernelShape

MIN_COMPUTE_CAPABILITY = (8, 0)
E4M3_COMPUTE_CAPABILITY = (8, 9)
MAX_HEAD_DIM = 256
# Triton's offsets have 32 bits, and a sign, below 4 GiB.
BYTES_THAT_OVERFLOW = range(2**31 + 1, 2**32 + 1)
DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e5m2", "float8_e4m3fn")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TritonPlan:
    """What all layers of a step share.

    decode_lens: context of each row that is a decode, 0 of the others. query_tiles: all other
    tokens; None if every row is a decode or padding.
    """

    block_tables: Int[Array, "S M"]
    decode_lens: Int[Array, "S"]
    query_tiles: QueryTiles | None


@dataclass(frozen=True, kw_only=True)
class TritonPagedAttention(InterleavedPool):
    """The backend of NVIDIA GPUs.

    group: query heads that share a KV head. interpret: run the kernels as plain XLA, to test
    them on a CPU. measured: sizes to take instead of those that `triton_sizes` chooses."""

    group: int
    head_dim: int
    interpret: bool = False
    measured: TritonSizes | None = None
    name: str = "triton"

    def supports(
        self,
        *,
        block_size: int,
        dtype: jnp.dtype,
        platform: str,
        compute_capability: tuple[int, int] | None,
    ) -> str | None:
        if compute_capability is None and not self.interpret:
            return "its kernels run on NVIDIA cards only"
        if compute_capability is not None and compute_capability < MIN_COMPUTE_CAPABILITY:
            have, needed = (
                ".".join(map(str, each)) for each in (compute_capability, MIN_COMPUTE_CAPABILITY)
            )
            return f"the card has compute capability {have}, and {needed} (A100) is needed"
        if self.head_dim > MAX_HEAD_DIM:
            return (
                f"the model's head_dim is {self.head_dim}, and at most {MAX_HEAD_DIM} is possible"
            )
        if dtype.name not in DTYPES:
            return f"the KV cache is of type {dtype.name}, and {', '.join(DTYPES)} are possible"
        has_e4m3 = compute_capability is None or compute_capability >= E4M3_COMPUTE_CAPABILITY
        if dtype.name == "float8_e4m3fn" and not has_e4m3:
            return "the card cannot convert float8_e4m3fn, while float8_e5m2 is possible"
        if block_size & (block_size - 1):
            return f"block_size is {block_size}, which is no power of two"
        return None

    def largest_pool(self, *, num_blocks: int, block_shape: tuple[int, ...], itemsize: int) -> int:
        size = math.prod(block_shape)
        if itemsize == 1 and num_blocks * size in BYTES_THAT_OVERFLOW:
            return BYTES_THAT_OVERFLOW.start // size
        return num_blocks

    def sizes(self, pool_dtype: jnp.dtype) -> TritonSizes:
        return self.measured or choose_sizes(self.group, self.head_dim, pool_dtype.itemsize)

    def plan(
        self, metadata: AttentionMetadata, *, num_tokens: int, block_size: int, decode_only: bool
    ) -> TritonPlan:
        rows = jnp.arange(metadata.context_lens.shape[0], dtype=jnp.int32)
        tiles = None
        if not decode_only:
            measured = self.measured
            rows_of_tile = measured.prefill_rows if measured else prefill_rows(self.head_dim)
            tiles = cut_query_tiles(
                metadata.query_starts,
                metadata.context_lens,
                metadata.num_decodes,
                num_tokens=num_tokens,
                tile_tokens=query_tile_tokens(self.group, rows_of_tile),
            )
        decode_lens = jnp.where(rows < metadata.num_decodes, metadata.context_lens, 0)
        return TritonPlan(metadata.block_tables, decode_lens, tiles)

    def attend(
        self,
        query: Float[Array, "T H D"],
        pool: Num[Array, "N B K2 D"],
        plan: TritonPlan,
        *,
        scale: float,
        window: Int[Array, ""] | int | None = None,
        softcap: float | None = None,
        sinks: Float[Array, "H"] | None = None,
        kv_scales: Float[Array, "K2"] | None = None,
    ) -> Float[Array, "T H D"]:
        _, num_heads, head_dim = query.shape
        num_kv_heads = pool.shape[2] // 2
        num_blocks, *block_shape = pool.shape
        assert num_heads == self.group * num_kv_heads, f"{num_heads=} {num_kv_heads=} {self.group=}"
        assert head_dim == self.head_dim, f"{head_dim=} {self.head_dim=}"
        largest = self.largest_pool(
            num_blocks=num_blocks, block_shape=tuple(block_shape), itemsize=pool.dtype.itemsize
        )
        assert num_blocks == largest, f"{num_blocks=}, and at most {largest} work"
        sizes = self.sizes(pool.dtype)
        shape = KernelShape(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=pool.shape[1],
            tile=sizes.decode_tile,
            rows=decode_rows(self.group, head_dim),
            num_warps=sizes.decode_warps,
            num_stages=sizes.decode_stages,
            scale=scale,
            softcap=softcap,
            has_window=window is not None,
            has_sinks=sinks is not None,
            has_kv_scales=kv_scales is not None,
        )
        if window is not None:
            window = jnp.asarray(window, jnp.int32).reshape(1)
        options = tuple(each for each in (window, sinks, kv_scales) if each is not None)
        arrays, interpret = (query, pool, plan.block_tables), self.interpret
        out = decode(
            *arrays,
            plan.decode_lens,
            options,
            shape=shape,
            wanted_programs=sizes.decode_programs,
            interpret=interpret,
        )
        if plan.query_tiles is None:
            return out
        shape = replace(
            shape,
            tile=sizes.prefill_tile,
            rows=sizes.prefill_rows,
            num_warps=sizes.prefill_warps,
            num_stages=sizes.prefill_stages,
        )
        return prefill(*arrays, plan.query_tiles, out, options, shape=shape, interpret=interpret)
