"""The compiled programs of an engine.

Forward programs are keyed by their number of tokens (mixed batches) or rows (decodes only),
sampling programs by rows only, so that counts add up instead of multiplying. All are lowered from
abstract shapes and compiled ahead of time; `Compiled` objects refuse any other shape instead of
compiling again.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered

from jpaged.execution.buckets import row_buckets, smallest_bucket, token_buckets
from jpaged.execution.device_mesh import whole_on
from jpaged.execution.kv_cache import KVCacheSpec
from jpaged.execution.sampler import VocabularyParts, sample
from jpaged.execution.slot_state import SlotColumn, SlotShape, SlotState
from jpaged.execution.step_inputs import ForwardShape, Outputs, sampling_input, unpack_forward
from jpaged.models.loading import Model
from jpaged.models.sharding import TENSOR_AXIS
from jpaged.target import Target
from pallas_kernels.paged_attention import PagedAttention, kv_slots

MAX_COMPILE_THREADS = 8
SMALLEST_COPY_BUCKET = 4
MAX_EARLY_WRITES = 4096  # changes of the state that one launch makes ahead of a step
SWAP_CHUNKS = (16, 4, 1)  # blocks that move at once to or from host memory

CompileProgram = Callable[[Lowered], Compiled]
_Tree = TypeVar("_Tree")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """Everything that decides what is compiled.

    num_slots: most requests that run at once. num_table_blocks: blocks of the longest sequence.
    num_swap_blocks: blocks that host memory takes of preempted requests.
    bucket_growth: how many times larger each size of a program is than the one before.
    mesh: of several devices, over which the model's parameters and the KV cache are split.
    """

    target: Target
    model: Model
    attention: PagedAttention
    kv_cache: KVCacheSpec
    num_slots: int
    max_num_tokens: int
    num_table_blocks: int
    seed: int
    num_swap_blocks: int = 0
    bucket_growth: int = 2
    mesh: Mesh | None = None

    @property
    def whole(self) -> NamedSharding | None:
        """Sharding of what every device has all of: the state and a step's inputs and outputs."""
        return whole_on(self.mesh)

    @property
    def vocabulary_parts(self) -> VocabularyParts | None:
        return None if self.mesh is None else VocabularyParts(self.mesh, TENSOR_AXIS)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        return row_buckets(self.num_slots, self.bucket_growth)

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return token_buckets(self.max_num_tokens, self.bucket_growth)

    def forward_shape(self, num_tokens: int, *, decode_only: bool) -> ForwardShape:
        """Shape of the smallest forward program that holds so many tokens."""
        buckets = self.row_buckets if decode_only else self.token_buckets
        num_tokens = smallest_bucket(buckets, num_tokens)
        return ForwardShape(
            num_tokens=num_tokens,
            num_rows=num_tokens if decode_only else self.num_slots,
            num_outputs=self.num_slots,
            decode_only=decode_only,
        )

    @property
    def copy_buckets(self) -> tuple[int, ...]:
        """A step copies at most one block a row."""
        return tuple(sorted({min(SMALLEST_COPY_BUCKET, self.num_slots), self.num_slots}))

    @property
    def slot_shape(self) -> SlotShape:
        return SlotShape(self.num_slots, self.num_table_blocks)

    @property
    def num_early_writes(self) -> int:
        return min(MAX_EARLY_WRITES, self.slot_shape.num_addresses)

    @property
    def swap_chunks(self) -> tuple[int, ...]:
        return SWAP_CHUNKS if self.num_swap_blocks else ()

    @property
    def num_programs(self) -> int:
        num_steps = len(self.forward_shapes()) + len(self.row_buckets)
        num_writes = 1
        return num_steps + num_writes + len(self.copy_buckets) + 2 * len(self.swap_chunks)

    def forward_shapes(self) -> list[ForwardShape]:
        """Of all forward programs, the largest first."""
        mixed = [self.forward_shape(size, decode_only=False) for size in self.token_buckets]
        decode = [self.forward_shape(size, decode_only=True) for size in self.row_buckets]
        return [*reversed(mixed), *reversed(decode)]


def forward_program(spec: ProgramSpec, shape: ForwardShape) -> Callable[..., Any]:
    """(params, pools, state, packed) -> (`Outputs`, pools, state)"""
    block_size = spec.kv_cache.block_size

    def forward(params, pools, state, packed):
        inputs, state = unpack_forward(packed, state, shape)
        metadata = inputs.attention
        slots = kv_slots(
            metadata.block_tables, inputs.rows, inputs.positions, block_size=block_size
        )
        plan = spec.attention.plan(
            metadata,
            num_tokens=shape.num_tokens,
            block_size=block_size,
            decode_only=shape.decode_only,
        )
        hidden, pools = spec.model.merge(params)(
            inputs.token_ids, inputs.positions, slots, pools, plan, attention=spec.attention
        )
        return inputs.outputs(hidden), pools, state

    return forward


def lower_forward(spec: ProgramSpec, shape: ForwardShape) -> Lowered:
    return jax.jit(
        forward_program(spec, shape),
        donate_argnames=("pools", "state"),
        out_shardings=(spec.whole, spec.kv_cache.sharding, spec.whole),
    ).lower(
        _abstract(spec.model.params),
        spec.kv_cache.abstract(),
        _on_all(spec, spec.slot_shape.abstract()),
        _int32(spec, shape.packed_size),
    )


def lower_sample(spec: ProgramSpec, num_rows: int) -> Lowered:
    """(params, `Outputs`, state) -> (`Samples` of the first rows, state)"""

    def sample_rows(params, outputs, state):
        outputs = outputs.first(num_rows)
        inputs = sampling_input(outputs, state)
        logits = spec.model.merge(params).logits(outputs.hidden)
        key, unroll = jax.random.key(spec.seed), not spec.target.is_cpu
        samples = sample(logits, inputs, key, unroll=unroll, parts=spec.vocabulary_parts)
        return samples, state.with_column(SlotColumn.LAST_TOKEN, inputs.slots, samples.tokens)

    outputs = Outputs.abstract(spec.num_slots, spec.model.config.hidden_size, spec.model.dtype)
    return jax.jit(sample_rows, donate_argnames="state", out_shardings=spec.whole).lower(
        _abstract(spec.model.params),
        _on_all(spec, outputs),
        _on_all(spec, spec.slot_shape.abstract()),
    )


def lower_write(spec: ProgramSpec) -> Lowered:
    """(state, writes) -> state"""
    return jax.jit(SlotState.write, donate_argnums=0, out_shardings=spec.whole).lower(
        _on_all(spec, spec.slot_shape.abstract()), _int32(spec, 2, spec.num_early_writes)
    )


def lower_copy(spec: ProgramSpec, num_blocks: int) -> Lowered:
    """(pools, [from, to]) -> pools; every copy takes what was there before any of them."""

    def copy(pools, blocks):
        return tuple(spec.attention.copy_blocks(pool, *blocks) for pool in pools)

    return jax.jit(copy, donate_argnames="pools", out_shardings=spec.kv_cache.sharding).lower(
        spec.kv_cache.abstract(), _int32(spec, 2, num_blocks)
    )


def lower_swap_out(spec: ProgramSpec, num_blocks: int) -> Lowered:
    """(pools, blocks) -> their content, layers first, in one array that moves as one"""

    def swap_out(pools, blocks):
        return jnp.stack([spec.attention.gather_blocks(pool, blocks) for pool in pools])

    return jax.jit(swap_out, out_shardings=_stacked(spec.kv_cache.sharding)).lower(
        spec.kv_cache.abstract(), _int32(spec, num_blocks)
    )


def lower_swap_in(spec: ProgramSpec, num_blocks: int) -> Lowered:
    """(pools, blocks, content of so many) -> pools"""

    def swap_in(pools, blocks, content):
        return tuple(
            spec.attention.scatter_blocks(pool, blocks, values)
            for pool, values in zip(pools, content, strict=True)
        )

    cache = spec.kv_cache
    content = jax.ShapeDtypeStruct(
        (cache.num_layers, num_blocks, *cache.layer_shape[1:]),
        cache.dtype,
        sharding=_stacked(cache.sharding),
    )
    return jax.jit(swap_in, donate_argnames="pools", out_shardings=cache.sharding).lower(
        cache.abstract(), _int32(spec, num_blocks), content
    )


@dataclass(frozen=True)
class Programs:
    """forward: by shape. sample: by number of rows. write: for `num_early_writes` changes of the
    state. The others: by number of blocks."""

    forward: dict[ForwardShape, Compiled]
    sample: dict[int, Compiled]
    write: Compiled
    copy: dict[int, Compiled]
    swap_out: dict[int, Compiled]
    swap_in: dict[int, Compiled]


def largest_programs(spec: ProgramSpec) -> list[Lowered]:
    """Those that need most temporary memory."""
    return [lower_forward(spec, spec.forward_shapes()[0]), lower_sample(spec, spec.num_slots)]


def temporary_bytes(compiled: Compiled) -> int:
    analysis = compiled.memory_analysis()
    return analysis.temp_size_in_bytes if analysis is not None else 0


def num_compile_threads() -> int:
    """One a core; at least two, as lowering is Python and compiling is not."""
    return min(max(os.cpu_count() or 1, 2), MAX_COMPILE_THREADS)


def compile_programs(
    spec: ProgramSpec, compile_program: CompileProgram, *, advance: Callable[[int], None]
) -> Programs:
    """Compile everything. `advance(1)` is called after each program and may end it by raising."""

    def compile_one(lower: Callable[[], Lowered]) -> Compiled:
        started = time.monotonic()
        lowered = lower()
        lowered_at = time.monotonic()
        compiled = compile_program(lowered)
        logger.debug(
            "lowered in %.2f s, compiled in %.2f s",
            lowered_at - started,
            time.monotonic() - lowered_at,
        )
        advance(1)
        return compiled

    threads = ThreadPoolExecutor(num_compile_threads(), thread_name_prefix="compile")

    def start(lower: Callable[[ProgramSpec, Any], Lowered], keys: Iterable[Any]) -> _Started:
        return {key: threads.submit(compile_one, partial(lower, spec, key)) for key in keys}

    try:
        forward = start(lower_forward, spec.forward_shapes())
        sampling = start(lower_sample, spec.row_buckets)
        writing = threads.submit(compile_one, partial(lower_write, spec))
        copying = start(lower_copy, spec.copy_buckets)
        swap_out = start(lower_swap_out, spec.swap_chunks)
        swap_in = start(lower_swap_in, spec.swap_chunks)
        return Programs(
            forward=_results(forward),
            sample=_results(sampling),
            write=writing.result(),
            copy=_results(copying),
            swap_out=_results(swap_out),
            swap_in=_results(swap_in),
        )
    finally:
        # An interrupted start leaves the programs that XLA is compiling behind, and no others.
        threads.shutdown(wait=False, cancel_futures=True)


_Started = dict[Any, Future[Compiled]]


def _results(futures: _Started) -> dict[Any, Compiled]:
    return {key: future.result() for key, future in futures.items()}


def _abstract(arrays: Iterable[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of arrays; on a mesh, also how they are split."""
    return tuple(
        jax.ShapeDtypeStruct(
            each.shape,
            each.dtype,
            sharding=each.sharding if isinstance(each.sharding, NamedSharding) else None,
        )
        for each in arrays
    )


def _on_all(spec: ProgramSpec, tree: _Tree) -> _Tree:
    """The same shapes, of arrays that every device has all of."""
    return jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=spec.whole), tree
    )


def _int32(spec: ProgramSpec, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=spec.whole)


def _stacked(sharding: NamedSharding | None) -> NamedSharding | None:
    """The sharding of such arrays behind an axis of their own."""
    return sharding and NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
