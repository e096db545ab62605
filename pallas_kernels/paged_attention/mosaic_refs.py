"""What the TPU kernel works on: its sizes, and its arguments by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import lax
from jaxtyping import Array

from pallas_kernels.paged_attention.head_major_pool import LANES

MAX_UNROLLED_HEADS = 8


@dataclass(frozen=True, kw_only=True)
class MosaicShape:
    """Everything static that the kernel depends on.

    width: W of the pool. tile_tokens: query tokens of a tile; 1 for decodes.
    fetch_blocks: K/V blocks of a buffer. chunk_blocks: K/V blocks of one matmul, a divisor of it.
    band_rows: rows of a block that are written at once; 0 if K/V are not written.
    """

    num_kv_heads: int
    group: int
    width: int
    block_size: int
    tile_tokens: int
    fetch_blocks: int
    chunk_blocks: int
    band_rows: int
    scale: float
    softcap: float | None
    has_window: bool
    has_sinks: bool
    has_kv_scales: bool
    vmem_limit: int

    @property
    def rows(self) -> int:
        """Rows of the matmuls: all query heads of a KV head, for every token of a tile."""
        return self.tile_tokens * self.group

    @property
    def staged_rows(self) -> int:
        """Room for the new K/V of a tile, wherever the first one lies in its band."""
        if self.tile_tokens == 1:
            return self.band_rows
        return max(self.tile_tokens, self.band_rows) + self.band_rows

    @property
    def lanes(self) -> int:
        """Lanes of queries and outputs.

        Where a register holds a key and a value, queries end in zeros and outputs begin with lanes
        that are dropped, so that no lane has to move.
        """
        return max(self.width, LANES)


class BlockRange(NamedTuple):
    """Blocks of an item's table row that its tokens see: [first, first + count)."""

    first: Array
    count: Array


class Refs(NamedTuple):
    """Arguments of the kernel; scalars first, scratch memory last. None: without that option."""

    rows: Any  # [Q] int32, as the next four: see `WorkItems`
    tiles: Any
    tokens: Any
    counts: Any
    ends: Any
    window: Any  # [1] int32
    kv_scales: Any  # [2K]
    query: Any  # [K, R, lanes]
    sinks: Any  # [K, R, 1]
    new_kv: Any  # [K, tile tokens, 2W]; tokens as in `query`
    table: Any  # [1, 1, M] int32, of the item's row
    next_table: Any  # of the next item's
    pool: Any  # [N, K, B, 2W], in the chip's main memory
    out: Any  # [K, R, lanes]
    written_pool: Any  # the same memory as `pool`, as an output
    buffers: Any  # [2, fetch_blocks, K, B, 2W]
    arrivals: Any  # [2] semaphores
    maximum: Any  # [K, R, LANES], the same in all lanes
    denominator: Any  # [K, R, LANES]
    total: Any  # [K, R, lanes]
    buffer: Any  # [1] int32: the one that holds the item's first blocks
    staged: Any  # [K, staged rows, 2W]: new K/V on their way to the pool
    departures: Any  # [1] semaphore


def name_refs(refs: tuple[Any, ...], shape: MosaicShape) -> Refs:
    rest, writes = iter(refs), shape.band_rows > 0
    has_option = {
        "window": shape.has_window,
        "kv_scales": shape.has_kv_scales,
        "sinks": shape.has_sinks,
        "new_kv": writes,
        "written_pool": writes,
        "staged": writes,
        "departures": writes,
    }
    named = Refs(*(next(rest) if has_option.get(name, True) else None for name in Refs._fields))
    return named._replace(pool=named.written_pool) if writes else named


def heads_at_a_time(num_heads: int) -> int:
    return max(n for n in range(1, MAX_UNROLLED_HEADS + 1) if num_heads % n == 0)


def for_each_head(num_heads: int, body: Callable[[Array | int], None]) -> None:
    """Loop over heads, several a turn: the matmul of one overlaps with the softmax of another."""
    unrolled = heads_at_a_time(num_heads)

    def some(index: Array | int, _: None) -> None:
        for offset in range(unrolled):
            body(index * unrolled + offset)

    if unrolled == num_heads:
        some(0, None)
    else:
        lax.fori_loop(0, num_heads // unrolled, some, None)
