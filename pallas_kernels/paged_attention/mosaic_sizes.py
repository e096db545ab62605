"""How much the TPU kernel moves and multiplies at a time unless a measurement says otherwise."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.paged_attention.head_major_pool import LANES, padded_width
from pallas_kernels.paged_attention.sizes import power_of_two_within, powers_of_two, size

MIB = 1 << 20
MAX_TILE_TOKENS = 128
MIN_TILE_TOKENS = 16
MAX_MATMUL_ROWS = 256  # of a prefill, if MIN_TILE_TOKENS do not need more
MAX_TILE_NUMBERS = 1 << 18  # of the queries in a prefill tile


@dataclass(frozen=True, kw_only=True)
class MosaicSizes:
    """Sizes that a measurement may choose.

    fetch_bytes: K/V copied at a time; while they are computed with, as many are on their way.

    chunk_tokens: K/V tokens of one matmul. prefill_queries: query tokens of a prefill tile.
    """

    fetch_bytes: int = size(*powers_of_two(64 << 10, 64 << 20))
    chunk_tokens: int = size(*powers_of_two(16, 4096))
    prefill_queries: int = size(*powers_of_two(MIN_TILE_TOKENS, 256))


@dataclass(frozen=True, kw_only=True)
class ChipSizes:
    """Sizes of one kind of chip.

    fetch_bytes: K/V copied at a time. vmem_limit: bytes of vector memory that a kernel may take."""

    fetch_bytes: int = 2 * MIB
    vmem_limit: int = 15 * MIB


# By `jax.Device.device_kind`. A fetch should take several times as long as the kernel's step that
# starts it and waits for it, about 1 us. More than that only delays the first matmul of a row, and
# takes vector memory where XLA has the next weights wait; so the kernel gets a quarter of it, and
# half where that is little. v4 has hardly more than its 2 MiB a fetch need.
#
#     chip   bandwidth   vector memory   a fetch takes
#     v4     1228 GB/s    16 MiB         1.7 us
#     v5e     819 GB/s   128 MiB         5.1 us
#     v5p    2765 GB/s    64 MiB         3.0 us
#     v6e    1640 GB/s   128 MiB         5.1 us
V4 = ChipSizes()
V5E = ChipSizes(fetch_bytes=4 * MIB, vmem_limit=32 * MIB)
V5P = V6E = ChipSizes(fetch_bytes=8 * MIB, vmem_limit=32 * MIB)
CHIPS = {
    "TPU v4": V4,
    "TPU v5 lite": V5E,
    "TPU v5e": V5E,
    "TPU v5": V5P,
    "TPU v5p": V5P,
    "TPU v6 lite": V6E,
    "TPU v6e": V6E,
}


def chip_sizes(device_kind: str) -> ChipSizes:
    """Sizes of a chip; an unknown one gets the sizes of v4, which has least memory."""
    return CHIPS.get(device_kind, V4)


def choose_chunk_tokens(dtype: jnp.dtype) -> int:
    """K/V tokens of one matmul.

    With 512, what a matmul needs to start and to end is little beside that. Float32 takes several
    matmuls for each, whose parts need memory as well."""
    return 128 if dtype == jnp.float32 else 512


def choose_prefill_queries(num_kv_heads: int, group: int, head_dim: int) -> int:
    """Query tokens of a prefill tile.

    K/V are read once for all tokens of a tile, so there are as many as fill the rows of a
    matmul and leave room for K/V in v4's memory.
    """
    numbers = num_kv_heads * group * max(padded_width(head_dim), LANES)
    most = min(MAX_TILE_TOKENS, MAX_MATMUL_ROWS // group, MAX_TILE_NUMBERS // numbers)
    return max(power_of_two_within(most), MIN_TILE_TOKENS)
