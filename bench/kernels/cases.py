"""What the benchmark of kernels runs: heads of real models, with batches as they occur."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from jpaged.errors import ConfigError
from pallas_kernels.paged_attention import NO_WINDOW, AttentionMetadata
from pallas_kernels.testing import MODEL_SHAPES, AttentionShape

WINDOW = 1024  # of models that have one
# More than the caches between memory and cores hold, so that every pool is read from memory.
ROTATED_BYTES = 256 << 20
MIN_POOLS, MAX_POOLS = 2, 16
Rows = tuple[tuple[int, int], ...]  # (query_len, context_len) of each sequence, decodes first


def _spread(count: int, shortest: int, longest: int) -> Rows:
    return tuple((1, int(length)) for length in np.geomspace(shortest, longest, count))


WORKLOADS: dict[str, Rows] = {
    "decode": ((1, 2048),) * 64,
    "decode-ragged": _spread(64, 64, 8192),
    "decode-one": ((1, 16384),),
    "prefill": ((2048, 2048),),
    "mixed": (*((1, 2048),) * 32, (512, 4096)),
}
# The same kinds, in sizes that a few cores can do.
CPU_WORKLOADS: dict[str, Rows] = {
    "decode": ((1, 512),) * 8,
    "decode-ragged": _spread(8, 16, 1024),
    "decode-one": ((1, 2048),),
    "prefill": ((256, 256),),
    "mixed": (*((1, 512),) * 4, (64, 512)),
}


@dataclass(frozen=True)
class Case:
    """One attention to time: heads of a model with one batch.

    model: the name of `shape`. dtype: type of the query. pool_dtype, block_size: of the KV cache.
    """

    model: str
    workload: str
    shape: AttentionShape
    rows: Rows
    dtype: jnp.dtype
    pool_dtype: jnp.dtype
    block_size: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.workload}"

    @property
    def window(self) -> int | None:
        return WINDOW if self.shape.has_window else None

    @property
    def num_tokens(self) -> int:
        return sum(query_len for query_len, _ in self.rows)

    @property
    def num_decodes(self) -> int:
        return sum(query_len == 1 for query_len, _ in self.rows)

    @property
    def decode_only(self) -> bool:
        return self.num_decodes == len(self.rows)

    @property
    def pool_bytes(self) -> int:
        num_blocks = sum(-(-length // self.block_size) for _, length in self.rows)
        return num_blocks * self.block_size * self._token_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that must move: K/V that some token sees, queries and answers."""
        window = self.window or NO_WINDOW
        num_seen = sum(min(length, window + query_len - 1) for query_len, length in self.rows)
        heads = self.num_tokens * self.shape.num_heads * self.shape.head_dim
        return num_seen * self._token_bytes + 2 * heads * self.dtype.itemsize

    @property
    def num_operations(self) -> int:
        """Operations of both matmuls, without those that masks hide."""
        window = self.window or NO_WINDOW
        num_pairs = sum(
            int(np.minimum(np.arange(length - query_len, length) + 1, window).sum())
            for query_len, length in self.rows
        )
        return 4 * num_pairs * self.shape.num_heads * self.shape.head_dim

    @property
    def _token_bytes(self) -> int:
        return 2 * self.shape.num_kv_heads * self.shape.head_dim * self.pool_dtype.itemsize


@dataclass(frozen=True)
class CaseInputs:
    """Arrays of a case.

    pools: several with other contents, each for the same block table, [N, B, 2K, D] if not in
    a backend's own layout. Slots that belong to no token are zero; in `poisoned`, the first pool
    once more, they are NaN or the largest number.

    options: window, sinks and kv_scales, where the case has them.
    """

    query: Float[Array, "T H D"]
    pools: list[Num[Array, "..."]]
    poisoned: Num[Array, "..."]
    block_tables: np.ndarray
    context_lens: np.ndarray
    query_starts: np.ndarray
    num_decodes: int
    options: dict[str, Array]

    @property
    def metadata(self) -> AttentionMetadata:
        return AttentionMetadata(
            jnp.array(self.block_tables),
            jnp.array(self.context_lens),
            jnp.array(self.query_starts),
            jnp.int32(self.num_decodes),
        )


def select_cases(
    pattern: str,
    *,
    is_cpu: bool,
    dtype: jnp.dtype,
    pool_dtype: jnp.dtype,
    choose_block_size: Callable[[AttentionShape], int],
) -> list[Case]:
    """Select the cases whose name, model/workload, matches a shell pattern."""
    workloads = CPU_WORKLOADS if is_cpu else WORKLOADS
    cases = [
        Case(model, workload, shape, rows, dtype, pool_dtype, choose_block_size(shape))
        for model, shape in MODEL_SHAPES.items()
        for workload, rows in workloads.items()
    ]
    matching = [case for case in cases if fnmatchcase(case.name, pattern)]
    if not matching:
        raise ConfigError(
            f"--shapes {pattern!r} matches none. Models: {', '.join(MODEL_SHAPES)}; workloads: "
            f"{', '.join(workloads)}; for example 'llama-3-8b/*'"
        )
    return matching


def draw_inputs(case: Case) -> CaseInputs:
    """Draw inputs on the device, as pools may be gigabytes. Blocks are out of order."""
    num_pools = min(max(-(-ROTATED_BYTES // case.pool_bytes), MIN_POOLS), MAX_POOLS)
    random, shape, block_size = np.random.default_rng(0), case.shape, case.block_size
    query_key, pool_key = jax.random.split(jax.random.key(0))
    lengths = np.array([length for _, length in case.rows], np.int32)
    num_blocks = -(-lengths // block_size)
    tables = np.zeros((len(case.rows), num_blocks.max()), np.int32)
    in_use = np.arange(tables.shape[1])[None] < num_blocks[:, None]
    tables[in_use] = random.permutation(num_blocks.sum()) + 1
    num_written = np.zeros(num_blocks.sum() + 1, np.int32)
    starts = np.arange(tables.shape[1])[None] * block_size
    num_written[tables[in_use]] = np.clip(lengths[:, None] - starts, 0, block_size)[in_use]
    is_written = jnp.array(np.arange(block_size)[None] < num_written[:, None])
    pool_shape = (*is_written.shape, 2 * shape.num_kv_heads, shape.head_dim)
    pool = _draw_pool(pool_key, pool_shape, case.pool_dtype, is_written)
    # Drawing them takes a CPU longer than all the rest, and moved ones are others as well.
    rotate = jax.jit(lambda pool, distance: jnp.roll(pool, distance, axis=3))
    pools = [pool, *(rotate(pool, jnp.int32(number)) for number in range(1, num_pools))]
    query = jax.random.normal(query_key, (case.num_tokens, shape.num_heads, shape.head_dim))
    query_lens = [query_len for query_len, _ in case.rows]
    return CaseInputs(
        query=query.astype(case.dtype),
        pools=pools,
        poisoned=_poison(pools[0], is_written),
        block_tables=tables,
        context_lens=lengths,
        query_starts=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        num_decodes=case.num_decodes,
        options=_draw_options(case, random),
    )


def _draw_options(case: Case, random: np.random.Generator) -> dict[str, Array]:
    options: dict[str, Array] = {}
    if case.window is not None:
        options["window"] = jnp.int32(case.window)
    if case.shape.has_sinks:
        options["sinks"] = jnp.array(random.normal(size=case.shape.num_heads), case.dtype)
    if case.pool_dtype.itemsize == 1:
        scales = random.uniform(0.5, 1.5, 2 * case.shape.num_kv_heads)
        size = 64 if case.pool_dtype == jnp.int8 else 1
        options["kv_scales"] = jnp.array(scales / size, jnp.float32)
    return options


def _draw_pool(
    key: Array, shape: tuple[int, ...], dtype: jnp.dtype, is_written: Array
) -> Num[Array, "N B K2 D"]:
    """Draw numbers that are about 1 in size once multiplied by their scales."""

    def draw(key, is_written):
        if dtype == jnp.int8:
            values = jax.random.randint(key, shape, -127, 128, jnp.int8)
        else:
            drawn_as = jnp.bfloat16 if dtype.itemsize == 1 else dtype
            values = jax.random.normal(key, shape, drawn_as).astype(dtype)
        return jnp.where(is_written[:, :, None, None], values, jnp.zeros((), dtype))

    return jax.jit(draw)(key, is_written)


def _poison(pool: Num[Array, "N B K2 D"], is_written: Array) -> Num[Array, "N B K2 D"]:
    worst = 127 if pool.dtype == jnp.int8 else jnp.nan
    return jax.jit(
        lambda pool, is_written: jnp.where(
            is_written[:, :, None, None], pool, jnp.array(worst, pool.dtype)
        )
    )(pool, is_written)
