"""Paged attention in Pallas kernels through Mosaic: the path of TPUs."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.api import AttentionMetadata
from pallas_kernels.paged_attention.head_major_pool import LANES, HeadMajorPool, padded_width
from pallas_kernels.paged_attention.mosaic_items import WorkItems, decode_items, prefill_items
from pallas_kernels.paged_attention.mosaic_kernel import attend_items
from pallas_kernels.paged_attention.mosaic_refs import MosaicShape

MAX_HEAD_DIM = 256
MAX_TILE_TOKENS = 128
MIN_TILE_TOKENS = 16
MAX_MATMUL_ROWS = 256  # of a prefill, if MIN_TILE_TOKENS do not need more
MAX_TILE_NUMBERS = 1 << 18  # of the queries in a prefill tile
# Of v4, which has least: 16 MiB, of which the compiler wants some.
VMEM_LIMIT = 15 << 20
# Rows of a register's tile, which a block has to fill.
MIN_BLOCK_SIZES = {"float32": 8, "bfloat16": 16, "int8": 32, "float8_e5m2": 32, "float8_e4m3fn": 32}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MosaicPlan:
    """The tokens [0, num_decodes) are decodes, [num_decodes, end) prefills, the rest padding.

    prefills: None if every row is a decode or padding.
    """

    block_tables: Int[Array, "S M"]
    num_decodes: Int[Array, ""]
    end: Int[Array, ""]
    decodes: WorkItems
    prefills: WorkItems | None


@dataclass(frozen=True, kw_only=True)
class MosaicPagedAttention(HeadMajorPool):
    """group: query heads that share a KV head. interpret: how to run the kernels on a CPU, to test
    them; see `jax.experimental.pallas.pallas_call`.

    fetch_bytes: K/V copied at a time; while they are computed with, as many are on their way.
    chunk_tokens: K/V tokens of one matmul.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    interpret: Any = False
    fetch_bytes: int = 2 << 20
    chunk_tokens: int = 512
    name: str = "pallas-tpu"

    def supports(
        self,
        *,
        block_size: int,
        dtype: jnp.dtype,
        platform: str,
        compute_capability: tuple[int, int] | None,
    ) -> str | None:
        if platform != "tpu" and not self.interpret:
            return "its kernels run on TPUs only"
        if self.head_dim > MAX_HEAD_DIM:
            return (
                f"the model's head_dim is {self.head_dim}, and at most {MAX_HEAD_DIM} is possible"
            )
        if dtype.name not in MIN_BLOCK_SIZES:
            possible = ", ".join(MIN_BLOCK_SIZES)
            return f"the KV cache is of type {dtype.name}, and {possible} are possible"
        least = MIN_BLOCK_SIZES[dtype.name]
        if block_size % least:
            return f"block_size is {block_size}, and {dtype.name} needs a multiple of {least}"
        needed = self.num_kv_heads * block_size * 2 * padded_width(self.head_dim) * dtype.itemsize
        if needed > self.fetch_bytes:
            return (
                f"a block of block_size {block_size} takes {needed >> 10} KiB a layer, and at most "
                f"{self.fetch_bytes >> 10} are possible"
            )
        return None

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a prefill tile, a power of two."""
        lanes = max(padded_width(self.head_dim), LANES)
        numbers = self.num_kv_heads * self.group * lanes
        most = min(MAX_TILE_TOKENS, MAX_MATMUL_ROWS // self.group, MAX_TILE_NUMBERS // numbers)
        return max(power_of_two_within(most), MIN_TILE_TOKENS)

    def plan(
        self, metadata: AttentionMetadata, *, num_tokens: int, block_size: int, decode_only: bool
    ) -> MosaicPlan:
        rows = jnp.arange(metadata.context_lens.shape[0], dtype=jnp.int32)
        decode_lens = jnp.where(rows < metadata.num_decodes, metadata.context_lens, 0)
        prefills = None
        if not decode_only:
            prefills = prefill_items(
                metadata.query_starts,
                metadata.context_lens,
                metadata.num_decodes,
                num_tokens=num_tokens,
                tile_tokens=self.tile_tokens,
            )
        return MosaicPlan(
            metadata.block_tables,
            metadata.num_decodes,
            metadata.query_starts[-1],
            decode_items(decode_lens, num_tokens=num_tokens),
            prefills,
        )

    def attend(
        self,
        query: Float[Array, "T H D"],
        pool: Num[Array, "N K B W2"],
        plan: MosaicPlan,
        *,
        scale: float,
        window: Int[Array, ""] | int | None = None,
        softcap: float | None = None,
        sinks: Float[Array, "H"] | None = None,
        kv_scales: Float[Array, "K2"] | None = None,
    ) -> Float[Array, "T H D"]:
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = pool.shape[1]
        expected = self.num_kv_heads, self.num_kv_heads * self.group, self.head_dim
        assert expected == (num_kv_heads, num_heads, head_dim), f"{expected=} {query.shape=}"
        options = {"sinks": sinks, "kv_scales": kv_scales}
        options = {name: value for name, value in options.items() if value is not None}
        if window is not None:
            options["window"] = jnp.asarray(window, jnp.int32).reshape(1)
        shape = self._kernel_shape(pool, plan, scale=scale, softcap=softcap, options=options)
        fill = ((0, 0), (0, 0), (0, 0), (0, shape.lanes - head_dim))
        query = jnp.pad(query.reshape(num_tokens, num_kv_heads, self.group, head_dim), fill)
        arrays = query, pool, plan.block_tables
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None, None, None]
        zeros = jnp.zeros_like(query)
        out = attend_items(*arrays, plan.decodes, options, shape=shape, interpret=self.interpret)
        out = jnp.where(tokens < plan.num_decodes, out, zeros)
        if plan.prefills is not None:
            shape = replace(shape, tile_tokens=self.tile_tokens)
            prefilled = self._prefill(*arrays, plan.prefills, options, shape)
            is_prefill = (tokens >= plan.num_decodes) & (tokens < plan.end)
            out = jnp.where(is_prefill, prefilled, out)
        first_lane = shape.lanes - shape.width
        out = out[:, :, :, first_lane : first_lane + head_dim]
        return out.reshape(num_tokens, num_heads, head_dim)

    def _prefill(
        self,
        query: Float[Array, "T K G L"],
        pool: Num[Array, "N K B W2"],
        block_tables: Int[Array, "S M"],
        items: WorkItems,
        options: dict[str, Array],
        shape: MosaicShape,
    ) -> Float[Array, "T K G L"]:
        num_tokens = query.shape[0]
        num_filled = -(-num_tokens // shape.tile_tokens) * shape.tile_tokens
        query = jnp.pad(query, ((0, num_filled - num_tokens), (0, 0), (0, 0), (0, 0)))
        size = (shape.num_kv_heads, num_filled, shape.group, shape.lanes)
        rows = query.swapaxes(0, 1).reshape(size[0], num_filled * shape.group, shape.lanes)
        out = attend_items(
            rows, pool, block_tables, items, options, shape=shape, interpret=self.interpret
        )
        return out.reshape(size).swapaxes(0, 1)[:num_tokens]

    def _kernel_shape(
        self,
        pool: Num[Array, "N K B W2"],
        plan: MosaicPlan,
        *,
        scale: float,
        softcap: float | None,
        options: dict[str, Array],
    ) -> MosaicShape:
        _, num_kv_heads, block_size, width = pool.shape
        block_bytes = num_kv_heads * block_size * width * pool.dtype.itemsize
        most_blocks = power_of_two_within(max(self.fetch_bytes // block_bytes, 1))
        # Float32 takes several matmuls for each, whose parts need memory as well.
        chunk_tokens = self.chunk_tokens // (4 if pool.dtype == jnp.float32 else 1)
        chunk_blocks = min(max(chunk_tokens // block_size, 1), most_blocks)
        # Not more than the longest context has.
        num_chunks = -(-plan.block_tables.shape[1] // chunk_blocks)
        return MosaicShape(
            num_kv_heads=num_kv_heads,
            group=self.group,
            width=padded_width(self.head_dim),
            block_size=block_size,
            tile_tokens=1,
            fetch_blocks=min(chunk_blocks * num_chunks, most_blocks),
            chunk_blocks=chunk_blocks,
            scale=scale,
            softcap=softcap,
            has_window="window" in options,
            has_sinks="sinks" in options,
            has_kv_scales="kv_scales" in options,
            vmem_limit=VMEM_LIMIT,
        )


def power_of_two_within(size: int) -> int:
    """The largest one that is not more."""
    return 1 << max(size.bit_length() - 1, 0)
