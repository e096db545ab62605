"""The pool of blocks that backends share: [N, B, 2K, D], K and V interleaved by head."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.api import PagedAttention
from pallas_kernels.paged_attention.block_moves import BlockMoves

DEFAULT_BLOCK_SIZE = 16


class InterleavedPool(BlockMoves):
    """The methods of `PagedAttention` that move K/V. Kernels gather tokens one by one, so small
    blocks cost nothing."""

    @property
    def heads_axis(self) -> int:
        return 2

    def default_block_size(self, *, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> int:
        return DEFAULT_BLOCK_SIZE

    def pool_shape(
        self, *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        return num_blocks, block_size, 2 * num_kv_heads, head_dim

    def largest_pool(self, *, num_blocks: int, block_shape: tuple[int, ...], itemsize: int) -> int:
        return num_blocks

    def largest_values(self, pool: Num[Array, "N B K2 D"]) -> Float[Array, "K2"]:
        """Largest absolute key and value of each KV head in the pool, interleaved."""
        return jnp.abs(pool.astype(jnp.float32)).max(axis=(0, 1, 3))

    def write(
        self,
        pool: Num[Array, "N B K2 D"],
        key: Float[Array, "T K D"],
        value: Float[Array, "T K D"],
        slots: Int[Array, "T"],
        *,
        kv_scales: Float[Array, "K2"] | None = None,
    ) -> Num[Array, "N B K2 D"]:
        block_size = pool.shape[1]
        num_tokens, num_kv_heads, head_dim = key.shape
        interleaved = jnp.stack([key, value], axis=2).reshape(
            num_tokens, 2 * num_kv_heads, head_dim
        )
        if kv_scales is not None:
            interleaved = interleaved.astype(jnp.float32) / kv_scales[None, :, None]
        return pool.at[slots // block_size, slots % block_size].set(
            to_storage(interleaved, pool.dtype), mode="drop"
        )

    def write_and_attend(
        self: PagedAttention,
        query: Float[Array, "T H D"],
        key: Float[Array, "T K D"],
        value: Float[Array, "T K D"],
        pool: Num[Array, "N B K2 D"],
        slots: Int[Array, "T"],
        plan: Any,
        *,
        kv_scales: Float[Array, "K2"] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "T H D"], Num[Array, "N B K2 D"]]:
        pool = self.write(pool, key, value, slots, kv_scales=kv_scales)
        return self.attend(query, pool, plan, kv_scales=kv_scales, **options), pool


def to_storage(values: Float[Array, "..."], dtype: jnp.dtype) -> Num[Array, "..."]:
    """Convert to the type of a pool; types of one byte take the nearest number in their range."""
    if dtype.itemsize > 1:
        return values.astype(dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    limits = jnp.iinfo(dtype) if is_integer else jnp.finfo(dtype)
    # -128 has no positive counterpart.
    values = jnp.clip(values, -float(limits.max), float(limits.max))
    return (jnp.round(values) if is_integer else values).astype(dtype)
