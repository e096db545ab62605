"""Paged attention in Pallas kernels through Mosaic: the path of TPUs."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.api import NO_WINDOW, AttentionMetadata
from pallas_kernels.paged_attention.head_major_pool import (
    BAND_ROWS,
    HeadMajorPool,
    padded_width,
    stored_pairs,
)
from pallas_kernels.paged_attention.mosaic_items import WorkItems, decode_items, prefill_items
from pallas_kernels.paged_attention.mosaic_kernel import attend_items
from pallas_kernels.paged_attention.mosaic_memory import kernel_vmem_bytes
from pallas_kernels.paged_attention.mosaic_refs import MosaicShape
from pallas_kernels.paged_attention.mosaic_sizes import (
    V4,
    MosaicSizes,
    choose_chunk_tokens,
    choose_prefill_queries,
)
from pallas_kernels.paged_attention.sizes import power_of_two_within

MAX_HEAD_DIM = 256


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
    """The backend of TPUs.

    group: query heads that share a KV head. interpret: how to run the kernels on a CPU, to test
    them; see `jax.experimental.pallas.pallas_call`.

    fetch_bytes, vmem_limit: see `ChipSizes`. chunk_tokens: see `MosaicSizes`; None: chosen by the
    pool's type. measured: sizes to take instead of all that is chosen.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    interpret: Any = False
    fetch_bytes: int = V4.fetch_bytes
    vmem_limit: int = V4.vmem_limit
    chunk_tokens: int | None = None
    measured: MosaicSizes | None = None
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
        if dtype.name not in BAND_ROWS:
            possible = ", ".join(BAND_ROWS)
            return f"the KV cache is of type {dtype.name}, and {possible} are possible"
        least = BAND_ROWS[dtype.name]
        if block_size % least:
            return f"block_size is {block_size}, and {dtype.name} needs a multiple of {least}"
        sizes, block_bytes = self.sizes(dtype), self._block_bytes(block_size, dtype)
        if block_bytes > sizes.fetch_bytes:
            return (
                f"a block of block_size {block_size} takes {block_bytes >> 10} KiB a layer, and at "
                f"most {sizes.fetch_bytes >> 10} are possible"
            )
        needed = self.vmem_bytes(block_size, dtype)
        if needed > self.vmem_limit:
            return (
                f"its kernels take {needed >> 20} MiB of the chip's vector memory with "
                f"fetch_bytes {sizes.fetch_bytes}, chunk_tokens {sizes.chunk_tokens} and "
                f"prefill_queries {sizes.prefill_queries}, and at most {self.vmem_limit >> 20} are "
                "possible"
            )
        return None

    def sizes(self, pool_dtype: jnp.dtype) -> MosaicSizes:
        return self.measured or MosaicSizes(
            fetch_bytes=self.fetch_bytes,
            chunk_tokens=self.chunk_tokens or choose_chunk_tokens(pool_dtype),
            prefill_queries=self.tile_tokens,
        )

    @property
    def tile_tokens(self) -> int:
        if self.measured is not None:
            return self.measured.prefill_queries
        return choose_prefill_queries(self.num_kv_heads, self.group, self.head_dim)

    def _block_bytes(self, block_size: int, dtype: jnp.dtype) -> int:
        return self.num_kv_heads * block_size * 2 * padded_width(self.head_dim) * dtype.itemsize

    def vmem_bytes(self, block_size: int, dtype: jnp.dtype) -> int:
        """Estimate the vector memory of a prefill, which takes more than a decode."""
        longest = NO_WINDOW // block_size  # longer than any context
        shape = self._kernel_shape(dtype, block_size=block_size, num_table_blocks=longest)
        band_rows = BAND_ROWS[dtype.name]
        tiles = replace(shape, tile_tokens=self.tile_tokens, band_rows=band_rows)
        return kernel_vmem_bytes(tiles, dtype)

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

    def write_and_attend(
        self,
        query: Float[Array, "T H D"],
        key: Float[Array, "T K D"],
        value: Float[Array, "T K D"],
        pool: Num[Array, "N K B W2"],
        slots: Int[Array, "T"],
        plan: MosaicPlan,
        *,
        kv_scales: Float[Array, "K2"] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "T H D"], Num[Array, "N K B W2"]]:
        pairs = stored_pairs(key, value, pool.dtype, kv_scales=kv_scales)
        # Exact: the types of queries hold all numbers of one byte.
        new_kv = pairs.astype(query.dtype) if pool.dtype.itemsize == 1 else pairs
        return self._run(query, new_kv, pool, plan, kv_scales=kv_scales, **options)

    def attend(
        self,
        query: Float[Array, "T H D"],
        pool: Num[Array, "N K B W2"],
        plan: MosaicPlan,
        **options: Any,
    ) -> Float[Array, "T H D"]:
        return self._run(query, None, pool, plan, **options)[0]

    def _run(
        self,
        query: Float[Array, "T H D"],
        new_kv: Float[Array, "T K W2"] | None,
        pool: Num[Array, "N K B W2"],
        plan: MosaicPlan,
        *,
        scale: float,
        window: Int[Array, ""] | int | None = None,
        softcap: float | None = None,
        sinks: Float[Array, "H"] | None = None,
        kv_scales: Float[Array, "K2"] | None = None,
    ) -> tuple[Float[Array, "T H D"], Num[Array, "N K B W2"]]:
        """Attend, and write `new_kv` unless it is None because the pool has it already."""
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = pool.shape[1]
        expected = self.num_kv_heads, self.num_kv_heads * self.group, self.head_dim
        assert expected == (num_kv_heads, num_heads, head_dim), f"{expected=} {query.shape=}"
        options = {"sinks": sinks, "kv_scales": kv_scales}
        options = {name: value for name, value in options.items() if value is not None}
        if window is not None:
            options["window"] = jnp.asarray(window, jnp.int32).reshape(1)
        shape = self._kernel_shape(
            pool.dtype,
            block_size=pool.shape[2],
            num_table_blocks=plan.block_tables.shape[1],
            scale=scale,
            softcap=softcap,
            options=options,
        )
        if new_kv is not None:
            shape = replace(shape, band_rows=BAND_ROWS[pool.dtype.name])
            assert shape.block_size % shape.band_rows == 0, f"{shape.block_size=} {pool.dtype=}"
        fill = ((0, 0), (0, 0), (0, 0), (0, shape.lanes - head_dim))
        query = jnp.pad(query.reshape(num_tokens, num_kv_heads, self.group, head_dim), fill)
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None, None, None]
        call = partial(
            attend_items, block_tables=plan.block_tables, options=options, interpret=self.interpret
        )
        pairs = None if new_kv is None else new_kv[: plan.decodes.rows.shape[0], :, None]
        out, pool = call(query, pairs, pool, items=plan.decodes, shape=shape)
        out = jnp.where(tokens < plan.num_decodes, out, jnp.zeros_like(query))
        if plan.prefills is not None:
            tile_tokens = self.tile_tokens
            call = partial(call, items=plan.prefills, shape=replace(shape, tile_tokens=tile_tokens))
            pairs = None if new_kv is None else _heads_first(new_kv[:, :, None], tile_tokens)
            rows, pool = call(_heads_first(query, tile_tokens), pairs, pool)
            rows = rows.reshape(num_kv_heads, -1, self.group, shape.lanes)
            is_prefill = (tokens >= plan.num_decodes) & (tokens < plan.end)
            out = jnp.where(is_prefill, rows.swapaxes(0, 1)[:num_tokens], out)
        first_lane = shape.lanes - shape.width
        out = out[:, :, :, first_lane : first_lane + head_dim]
        return out.reshape(num_tokens, num_heads, head_dim), pool

    def _kernel_shape(
        self,
        pool_dtype: jnp.dtype,
        *,
        block_size: int,
        num_table_blocks: int,
        scale: float = 1.0,
        softcap: float | None = None,
        options: Collection[str] = (),
    ) -> MosaicShape:
        """Static description of the decode kernel.

        num_table_blocks: blocks of the longest context. options: names of the options given.
        """
        sizes = self.sizes(pool_dtype)
        block_bytes = self._block_bytes(block_size, pool_dtype)
        most_blocks = power_of_two_within(max(sizes.fetch_bytes // block_bytes, 1))
        chunk_blocks = min(max(sizes.chunk_tokens // block_size, 1), most_blocks)
        num_chunks = -(-num_table_blocks // chunk_blocks)
        return MosaicShape(
            num_kv_heads=self.num_kv_heads,
            group=self.group,
            width=padded_width(self.head_dim),
            block_size=block_size,
            tile_tokens=1,
            fetch_blocks=min(chunk_blocks * num_chunks, most_blocks),
            chunk_blocks=chunk_blocks,
            band_rows=0,
            scale=scale,
            softcap=softcap,
            has_window="window" in options,
            has_sinks="sinks" in options,
            has_kv_scales="kv_scales" in options,
            vmem_limit=self.vmem_limit,
        )


def _heads_first(rows: Float[Array, "T K R lanes"], tile_tokens: int) -> Float[Array, "K TR lanes"]:
    """Put heads first, and fill tokens up to whole tiles."""
    num_tokens, num_kv_heads, _, lanes = rows.shape
    rows = jnp.pad(rows, ((0, -num_tokens % tile_tokens), (0, 0), (0, 0), (0, 0)))
    return rows.swapaxes(0, 1).reshape(num_kv_heads, -1, lanes)
