"""JAX's own paged attention for TPUs as a backend, to compare with."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

from pallas_kernels.paged_attention import AttentionMetadata
from pallas_kernels.paged_attention.interleaved_pool import InterleavedPool


@dataclass(frozen=True, kw_only=True)
class BundledTpuAttention(InterleavedPool):
    """Only what a step calls.

    fetch_blocks, tile_tokens: the kernel chooses them by the chip that the process has, if any.
    """

    fetch_blocks: int
    tile_tokens: int
    name: str = "jax-tpu"

    def plan(self, metadata: AttentionMetadata, **_: Any) -> tuple[jax.Array, ...]:
        num_rows = (metadata.context_lens > 0).sum(dtype=jnp.int32).reshape(1)
        return metadata.context_lens, metadata.block_tables, metadata.query_starts, num_rows

    def attend(
        self,
        query: jax.Array,
        pool: jax.Array,
        plan: tuple[jax.Array, ...],
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        kv_scales: None = None,
    ) -> jax.Array:
        return ragged_paged_attention(
            query,
            pool,
            *plan,
            sm_scale=scale,
            sliding_window=window,
            soft_cap=softcap,
            num_kv_pages_per_block=self.fetch_blocks,
            num_queries_per_block=self.tile_tokens,
        )
