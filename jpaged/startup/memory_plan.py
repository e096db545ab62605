"""Plans the memory of an engine from abstract shapes, before anything is read or allocated."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp

from jpaged.config import GIB, EngineConfig
from jpaged.errors import ConfigError
from jpaged.execution.attention_choice import choose_block_size
from jpaged.execution.device_mesh import device_mesh
from jpaged.execution.kv_cache import KVCacheSpec, kv_cache_spec
from jpaged.execution.programs import (
    CompileProgram,
    ProgramSpec,
    largest_programs,
    temporary_bytes,
)
from jpaged.models.config import ModelConfig
from jpaged.models.loading import Model
from jpaged.startup.device_memory import DeviceMemory
from jpaged.startup.host_memory import host_memory_limit
from jpaged.startup.step_limits import StepLimits
from jpaged.target import Target
from pallas_kernels.paged_attention import PagedAttention

DEFAULT_SWAP_BYTES = 4 * GIB
# Host memory is shared with everything else that runs: an explicit option may take more.
CPU_KV_CACHE_BYTES = 2 * GIB

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryBudget:
    """Where the memory of a device goes, in bytes.

    programs: temporary memory of the largest program.
    """

    memory: DeviceMemory
    weights: int
    programs: int

    @property
    def kv_cache(self) -> int:
        """Bytes left for the KV cache; negative if the model does not fit."""
        return int(self.memory.limit * self.memory.share) - self.used

    @property
    def used(self) -> int:
        return self.memory.taken + self.weights + self.programs

    def __str__(self) -> str:
        amounts = (self.memory.limit, self.weights, self.programs, self.memory.taken)
        limit, weights, programs, taken = (f"{value / GIB:.2f}" for value in amounts)
        return (
            f"{limit} GiB ({self.memory.source}) x {self.memory.share:.3g} - {weights} weights "
            f"- {programs} programs - {taken} in use = {self.kv_cache / GIB:.2f} GiB"
        )


def plan_memory(
    config: EngineConfig,
    target: Target,
    model: Model,
    attention: PagedAttention,
    limits: StepLimits,
    memory: DeviceMemory,
    *,
    compile_program: CompileProgram,
    kv_dtype: jnp.dtype,
    max_model_len: int,
) -> tuple[ProgramSpec, int]:
    """What to compile, and the context limit that the memory allows.

    model: may be abstract. Raises `ConfigError` with the numbers if it does not fit.
    """
    block_size = choose_block_size(config, attention, model.config, kv_dtype)
    make_kv_cache = partial(kv_cache_spec, model.config, attention, kv_dtype, block_size=block_size)
    spec = ProgramSpec(
        target=target,
        model=model,
        attention=attention,
        kv_cache=make_kv_cache(num_blocks=1),
        num_slots=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        num_table_blocks=-(-max_model_len // block_size),
        seed=config.seed,
        bucket_growth=config.bucket_growth,
        mesh=device_mesh(target),
    )
    must_measure = _must_measure(config, target)
    programs = measured_program_bytes(spec, compile_program) if must_measure else 0
    budget = MemoryBudget(memory, model.num_bytes, programs)
    num_blocks = choose_num_blocks(config, budget, spec)
    num_blocks = fit_pool(config, attention, make_kv_cache(num_blocks=num_blocks))
    max_model_len = fit_max_model_len(config, num_blocks, max_model_len, block_size=block_size)
    spec = replace(
        spec,
        kv_cache=make_kv_cache(num_blocks=num_blocks),
        num_table_blocks=-(-max_model_len // block_size),
        num_swap_blocks=choose_num_swap_blocks(
            config, target, block_bytes=spec.kv_cache.host_block_bytes
        ),
    )
    return spec, max_model_len


def _must_measure(config: EngineConfig, target: Target) -> bool:
    """Whether the pool's size depends on what programs need. On a CPU the cache takes a fixed
    share of the memory, next to which the programs' few megabytes do not count."""
    is_given = config.kv_cache_memory_bytes or config.num_gpu_blocks_override
    return not is_given and not target.is_cpu


def measured_program_bytes(spec: ProgramSpec, compile_program: CompileProgram) -> int:
    """Temporary memory of the largest programs, which does not depend on the pool's size."""
    return max(temporary_bytes(compile_program(lowered)) for lowered in largest_programs(spec))


def choose_num_blocks(config: EngineConfig, budget: MemoryBudget, spec: ProgramSpec) -> int:
    """Usable blocks of the pool: what an option says, or what fits the memory.

    spec: what is compiled, but for the number of blocks. On a CPU the default is no more than all
    requests of full length could fill at once; on devices free memory would be of no other use
    than keeping prefixes.
    """
    size, block_bytes = spec.kv_cache.block_size, spec.kv_cache.block_bytes
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        _check_given(budget, "num_gpu_blocks_override", num_blocks, (num_blocks + 1) * block_bytes)
        return num_blocks
    source = str(budget)
    num_bytes = budget.kv_cache
    is_given = config.kv_cache_memory_bytes is not None
    if config.kv_cache_memory_bytes is not None:
        num_bytes, source = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        _check_given(budget, source, num_bytes, num_bytes)
    elif spec.target.is_cpu:
        num_bytes = min(num_bytes, CPU_KV_CACHE_BYTES // spec.target.num_devices)
    # One more block is the sink of padding.
    num_blocks = num_bytes // block_bytes - 1
    if num_blocks < 1:
        missing = (2 * block_bytes - num_bytes) / GIB
        raise ConfigError(
            f"no memory for the KV cache: a block of {size} tokens takes {block_bytes} bytes, and "
            f"two are needed, but there are {max(num_bytes, 0)} ({source}): {missing:.2f} GiB are "
            "missing. Raise kv_cache_memory_bytes or gpu_memory_utilization, use a smaller model, "
            "or run where there is more memory."
        )
    if spec.target.is_cpu and not is_given:
        num_blocks = min(num_blocks, spec.num_slots * spec.num_table_blocks)
    logger.info(
        "KV cache: %s; %d blocks of %d tokens, %.2f GiB",
        source,
        num_blocks,
        size,
        num_blocks * block_bytes / GIB,
    )
    return num_blocks


def _check_given(budget: MemoryBudget, name: str, value: int, num_bytes: int) -> None:
    """Refuse a size of the KV cache, given as an option, that cannot be had."""
    available = budget.memory.limit - budget.used
    if num_bytes > available:
        raise ConfigError(
            f"{name} is {value}, which takes {num_bytes / GIB:.2f} GiB, but only "
            f"{max(available, 0) / GIB:.2f} GiB are left beside the model ({budget}). Choose less."
        )


def fit_pool(config: EngineConfig, attention: PagedAttention, wanted: KVCacheSpec) -> int:
    """Usable blocks: those wanted, or fewer where the backend cannot work with so many."""
    num_blocks, *block_shape = wanted.layer_shape
    largest = attention.largest_pool(
        num_blocks=num_blocks, block_shape=tuple(block_shape), itemsize=wanted.dtype.itemsize
    )
    num_possible = wanted.num_blocks - (num_blocks - largest)
    if num_possible == wanted.num_blocks:
        return num_possible
    if config.num_gpu_blocks_override is not None:
        raise ConfigError(
            f"num_gpu_blocks_override is {config.num_gpu_blocks_override}, but {attention.name} "
            f"attention cannot work with a {wanted.dtype.name} KV cache of that size: "
            f"choose at most {num_possible}."
        )
    logger.info("%d blocks, the most %s attention can do", num_possible, attention.name)
    return num_possible


def choose_num_swap_blocks(
    config: EngineConfig,
    target: Target,
    *,
    block_bytes: int,
    memory_limit: Callable[[], int] = host_memory_limit,
) -> int:
    """Blocks of preempted requests that host memory takes."""
    limit, wanted = memory_limit(), config.swap_space
    if wanted is not None and wanted * GIB > limit:
        raise ConfigError(
            f"swap_space of {wanted} GiB is more than the memory that this process may use, "
            f"{limit / GIB:.1f} GiB: choose less"
        )
    if config.preemption_mode == "recompute":
        return 0
    if wanted is not None:
        num_bytes = int(wanted * GIB)
    elif target.is_cpu and config.preemption_mode == "auto":
        # The pool is in that memory itself: better have a larger one.
        return 0
    else:
        num_bytes = min(DEFAULT_SWAP_BYTES, limit // 8)
    return num_bytes // block_bytes


def fit_max_model_len(
    config: EngineConfig, num_blocks: int, wanted: int, *, block_size: int
) -> int:
    """The context limit: `wanted`, or what one request alone can use of the pool.

    A user who has set both the limit and the number of blocks keeps both: prompts that do not fit
    the pool are refused one by one.
    """
    capacity = num_blocks * block_size
    if wanted <= capacity or (config.max_model_len and config.num_gpu_blocks_override):
        return wanted
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len {config.max_model_len} needs a KV cache of that many tokens, but only "
            f"{capacity} fit ({num_blocks} blocks of {block_size}): "
            f"set max_model_len to at most {capacity}, or give the KV cache more memory."
        )
    logger.info("max_model_len is %d, all that the KV cache holds (model: %d)", capacity, wanted)
    return capacity


def wanted_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The option, checked against what the model can do; by default all the model can do."""
    trained = model.max_position_embeddings
    if config.max_model_len is None:
        return trained
    if config.max_model_len > trained:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is more than the model's {trained} positions"
        )
    return config.max_model_len
