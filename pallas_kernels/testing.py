"""What tests and benchmarks of the kernels share: shapes of real models, ragged batches in which
nothing may be read that is not there, and how exact each type is."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import NO_WINDOW, AttentionMetadata

# Of results about 1 in size.
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads of a model, and the options of its attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_window: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    scale: float | None = None  # None: 1 / sqrt(head_dim)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


MODEL_SHAPES = {
    "smollm2-135m": AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64),
    "llama-3-8b": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128),
    "llama-3-70b": AttentionShape(num_heads=64, num_kv_heads=8, head_dim=128),
    "llama-2-7b": AttentionShape(num_heads=32, num_kv_heads=32, head_dim=128),
    "mistral-7b": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, has_window=True),
    "phi-2": AttentionShape(num_heads=32, num_kv_heads=32, head_dim=80),
    "phi-3-mini": AttentionShape(num_heads=32, num_kv_heads=32, head_dim=96, has_window=True),
    "falcon-7b": AttentionShape(num_heads=71, num_kv_heads=1, head_dim=64),
    "gemma-2-9b": AttentionShape(
        num_heads=16, num_kv_heads=8, head_dim=256, has_window=True, softcap=50.0, scale=1 / 16
    ),
    "gpt-oss-20b": AttentionShape(
        num_heads=64, num_kv_heads=8, head_dim=64, has_window=True, has_sinks=True
    ),
}


@dataclass(frozen=True)
class RaggedBatch:
    """A batch as numpy arrays, as `PagedAttention` wants it; decodes come first.

    Slots of the pool that belong to no token of a sequence are NaN, or the largest number where
    the type has no NaN. kv_scales: scales of a pool of one byte a number, else None.
    """

    query: np.ndarray
    pool: np.ndarray
    block_tables: np.ndarray
    context_lens: np.ndarray
    query_starts: np.ndarray
    num_decodes: int
    kv_scales: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return int(self.query_starts[-1])

    @property
    def slots(self) -> np.ndarray:
        """Slot of each query token in the pool; padding has slots of the sink block."""
        slots, block_size = np.zeros(len(self.query), np.int32), self.pool.shape[1]
        for row, end in enumerate(self.context_lens):
            tokens = slice(self.query_starts[row], self.query_starts[row + 1])
            positions = np.arange(end - (tokens.stop - tokens.start), end)
            blocks = self.block_tables[row, positions // block_size]
            slots[tokens] = blocks * block_size + positions % block_size
        return slots

    @property
    def metadata(self) -> AttentionMetadata:
        return AttentionMetadata(
            jnp.array(self.block_tables),
            jnp.array(self.context_lens),
            jnp.array(self.query_starts),
            jnp.int32(self.num_decodes),
        )


def ragged_batch(
    random: np.random.Generator,
    rows: Sequence[tuple[int, int]],
    shape: AttentionShape,
    *,
    block_size: int,
    dtype: str = "float32",
    pool_dtype: str | None = None,
    window: int | None = None,
    pad_rows: int = 2,
    pad_tokens: int = 3,
) -> RaggedBatch:
    """Draw a batch. rows: (query_len, context_len) of each sequence, decodes first.

    pool_dtype: the type of the query by default.
    window: slots of tokens that no token of the batch sees any more are poisoned.

    Blocks are out of order; every second row has half of the full blocks of its past in common with
    the row before it. Padding comes last: `pad_rows` empty rows, `pad_tokens` tokens of no row.
    """
    tables = _draw_tables(random, rows, block_size, pad_rows)
    contexts = np.array([length for _, length in rows] + [0] * pad_rows, np.int32)
    pool, kv_scales = _draw_pool(
        random,
        (int(tables.max()) + 3, block_size, 2 * shape.num_kv_heads, shape.head_dim),
        jnp.dtype(pool_dtype or dtype),
    )
    is_written = np.zeros(pool.shape[:2], bool)
    for table, (query_len, context_len) in zip(tables, rows, strict=False):
        first = max(context_len - query_len + 1 - (window or NO_WINDOW), 0)
        positions = np.arange(first, context_len)
        is_written[table[positions // block_size], positions % block_size] = True
    poison = np.iinfo(pool.dtype).max if pool.dtype == np.int8 else np.nan
    pool[~is_written] = poison
    query_lens = [query_len for query_len, _ in rows] + [0] * pad_rows
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    query = random.normal(size=(starts[-1] + pad_tokens, shape.num_heads, shape.head_dim))
    num_decodes = next((i for i, (length, _) in enumerate(rows) if length > 1), len(rows))
    return RaggedBatch(
        query.astype(jnp.dtype(dtype)), pool, tables, contexts, starts, num_decodes, kv_scales
    )


def _draw_pool(
    random: np.random.Generator, shape: tuple[int, ...], dtype: jnp.dtype
) -> tuple[np.ndarray, np.ndarray | None]:
    """Draw numbers that are about 1 in size once multiplied by the scales of their heads."""
    if dtype.itemsize > 1:
        return random.normal(size=shape).astype(dtype), None
    kv_scales = random.uniform(0.5, 1.5, shape[2]).astype(np.float32)
    if dtype == np.int8:
        return random.integers(-127, 128, shape).astype(dtype), kv_scales / 64
    return random.normal(size=shape).astype(dtype), kv_scales


def _draw_tables(
    random: np.random.Generator, rows: Sequence[tuple[int, int]], block_size: int, pad_rows: int
) -> np.ndarray:
    num_blocks = [-(-length // block_size) for _, length in rows]
    pasts = [length - query_len for query_len, length in rows]
    tables = np.zeros((len(rows) + pad_rows, max(num_blocks, default=0) + 1), np.int32)
    free = list(random.permutation(np.arange(1, sum(num_blocks) + 3)))
    for row in range(len(rows)):
        num_shared = 0
        if row % 2:
            num_shared = min(pasts[row - 1], pasts[row]) // block_size // 2
            tables[row, :num_shared] = tables[row - 1, :num_shared]
        for column in range(num_shared, num_blocks[row]):
            tables[row, column] = free.pop()
    return tables
