"""What the TPU kernel works on: its sizes, and its arguments by name."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from pallas_kernels.paged_attention.head_major_pool import LANES


@dataclass(frozen=True, kw_only=True)
class MosaicShape:
    """Everything static that the kernel depends on.

    width: W of the pool. tile_tokens: query tokens of a tile; 1 for decodes.
    fetch_blocks: K/V blocks of a buffer. chunk_blocks: those of one matmul, a divisor of it.
    """

    num_kv_heads: int
    group: int
    width: int
    block_size: int
    tile_tokens: int
    fetch_blocks: int
    chunk_blocks: int
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
    def lanes(self) -> int:
        """Of queries and outputs. Where a register holds a key and a value, queries end in zeros
        and outputs begin with what is not needed: no lane has to move."""
        return max(self.width, LANES)


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
    table: Any  # [1, 1, M] int32, of the item's row
    next_table: Any  # of the next item's
    pool: Any  # [N, K, B, 2W], in the chip's main memory
    out: Any  # [K, R, lanes]
    buffers: Any  # [2, fetch_blocks, K, B, 2W]
    arrivals: Any  # [2] semaphores
    maximum: Any  # [K, R, LANES], the same in all lanes
    denominator: Any  # [K, R, LANES]
    total: Any  # [K, R, lanes]
    buffer: Any  # [1] int32: the one that holds the item's first blocks


def name_refs(refs: tuple[Any, ...], shape: MosaicShape) -> Refs:
    rest = iter(refs)
    has_option = {
        "window": shape.has_window,
        "kv_scales": shape.has_kv_scales,
        "sinks": shape.has_sinks,
    }
    return Refs(*(next(rest) if has_option.get(name, True) else None for name in Refs._fields))
