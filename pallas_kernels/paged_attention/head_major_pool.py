"""The pool of blocks that TPU kernels want: [N, K, B, 2W], K and V of a head side by side.

The last two axes are what a TPU tiles: a block of one head is whole tiles whatever the number of
heads is. W is the head dimension, filled up with zeros to 64 or to a multiple of 128; memory would
be taken up to there anyway.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.block_moves import BlockMoves
from pallas_kernels.paged_attention.interleaved_pool import DEFAULT_BLOCK_SIZE, to_storage

LANES = 128
# Rows of a register, which a block has to fill.
BAND_ROWS = {"float32": 8, "bfloat16": 16, "int8": 32, "float8_e5m2": 32, "float8_e4m3fn": 32}
MIN_DMA_BYTES = 64 << 10  # about; of a block in one layer
MAX_BLOCK_SIZE = 256


def padded_width(head_dim: int) -> int:
    """Return W. Keys and values of up to 64 dimensions share the 128 lanes of a register."""
    return LANES // 2 if head_dim <= LANES // 2 else -(-head_dim // LANES) * LANES


class HeadMajorPool(BlockMoves):
    """The methods of `PagedAttention` that move K/V. A block is moved by one DMA, which takes some
    50 ns of a chip's scalar unit, however small it is; in that time v6e reads 80 KiB."""

    @property
    def heads_axis(self) -> int:
        return 1

    def default_block_size(self, *, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> int:
        token_bytes = num_kv_heads * 2 * padded_width(head_dim) * dtype.itemsize
        block_size = max(BAND_ROWS.get(dtype.name, 0), DEFAULT_BLOCK_SIZE)
        while block_size < MAX_BLOCK_SIZE and block_size * token_bytes < MIN_DMA_BYTES:
            block_size *= 2
        return block_size

    def pool_shape(
        self, *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * padded_width(head_dim)

    def largest_pool(self, *, num_blocks: int, block_shape: tuple[int, ...], itemsize: int) -> int:
        return num_blocks

    def write(
        self,
        pool: Num[Array, "N K B W2"],
        key: Float[Array, "T K D"],
        value: Float[Array, "T K D"],
        slots: Int[Array, "T"],
        *,
        kv_scales: Float[Array, "K2"] | None = None,
    ) -> Num[Array, "N K B W2"]:
        num_blocks, num_kv_heads, block_size, width = pool.shape
        pairs = stored_pairs(key, value, pool.dtype, kv_scales=kv_scales)
        heads = jnp.arange(num_kv_heads, dtype=slots.dtype)[None, :]
        blocks, offsets = slots[:, None] // block_size, slots[:, None] % block_size
        # Rows of a matrix are scattered in place, while a scatter into a middle axis copies.
        rows = pool.reshape(num_blocks * num_kv_heads * block_size, width)
        indices = (blocks * num_kv_heads + heads) * block_size + offsets
        rows = rows.at[indices].set(pairs, mode="drop")
        return rows.reshape(pool.shape)


def stored_pairs(
    key: Float[Array, "T K D"],
    value: Float[Array, "T K D"],
    dtype: jnp.dtype,
    *,
    kv_scales: Float[Array, "K2"] | None = None,
) -> Num[Array, "T K W2"]:
    """Key and value of each token and head as a pool of `dtype` stores them."""
    if kv_scales is not None:
        key = key.astype(jnp.float32) / kv_scales[None, 0::2, None]
        value = value.astype(jnp.float32) / kv_scales[None, 1::2, None]
    head_dim = key.shape[2]
    fill = ((0, 0), (0, 0), (0, padded_width(head_dim) - head_dim))
    pairs = jnp.concatenate([jnp.pad(key, fill), jnp.pad(value, fill)], axis=2)
    return to_storage(pairs, dtype)
