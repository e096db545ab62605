"""The paged KV cache: how many blocks fit, and their allocation."""

import logging
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jpaged.config import GIB, EngineConfig, host_memory_bytes
from jpaged.errors import ConfigError
from jpaged.models.config import ModelConfig
from pallas_kernels.paged_attention import PagedAttention

DEFAULT_SWAP_BYTES = 4 * GIB
# Host memory is shared with everything else that runs: an explicit option may take more.
CPU_KV_CACHE_BYTES = 2 * GIB

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of the cache: a pool of blocks for every layer, block 0 of each being the sink."""

    num_layers: int
    num_blocks: int  # usable ones, without the sink
    block_size: int
    layer_shape: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, with what a backend fills up."""
        return self.num_layers * math.prod(self.layer_shape[1:]) * self.dtype.itemsize

    def abstract(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(self.layer_shape, self.dtype),) * self.num_layers

    def allocate(self) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(self.layer_shape, self.dtype) for _ in range(self.num_layers))


def kv_cache_spec(
    model: ModelConfig,
    attention: PagedAttention,
    dtype: jnp.dtype,
    *,
    num_blocks: int,
    block_size: int,
) -> KVCacheSpec:
    layer_shape = attention.pool_shape(
        num_blocks=num_blocks + 1,
        block_size=block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
    return KVCacheSpec(model.num_layers, num_blocks, block_size, layer_shape, dtype)


@dataclass(frozen=True)
class MemoryBudget:
    """Where the device's memory goes, in bytes. `programs`: temporary memory of the largest."""

    limit: int
    utilization: float
    weights: int
    programs: int

    @property
    def kv_cache(self) -> int:
        return int(self.limit * self.utilization) - self.weights - self.programs

    def __str__(self) -> str:
        parts = [f"{value / GIB:.2f}" for value in (self.limit, self.weights, self.programs)]
        return (
            f"{parts[0]} GiB x {self.utilization} - {parts[1]} weights - {parts[2]} programs "
            f"= {self.kv_cache / GIB:.2f} GiB for the KV cache"
        )


def device_memory_limit() -> int:
    """Bytes that one device offers; of a CPU, the machine's memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return host_memory_bytes()


def choose_num_blocks(
    config: EngineConfig,
    budget: MemoryBudget,
    *,
    block_size: int,
    block_num_bytes: int,
    max_model_len: int,
) -> int:
    """Usable blocks of the pool: what an option says, or what fits the memory.

    More than every request of full length could fill at once is never taken.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if config.kv_cache_memory_bytes is not None:
        num_bytes, source = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    else:
        num_bytes, source = budget.kv_cache, str(budget)
        if jax.default_backend() == "cpu":
            num_bytes = min(num_bytes, CPU_KV_CACHE_BYTES)
    # One more block is the sink of padding.
    num_blocks = num_bytes // block_num_bytes - 1
    if num_blocks < 1:
        raise ConfigError(
            f"no memory for the KV cache: a block of {block_size} tokens takes "
            f"{block_num_bytes} bytes, and two are needed, but there are {num_bytes} ({source}). "
            "Raise kv_cache_memory_bytes or gpu_memory_utilization, or serve a smaller model."
        )
    most_useful = config.max_num_seqs * -(-max_model_len // block_size)
    num_blocks = min(num_blocks, most_useful)
    logger.info(
        "KV cache: %s; %d blocks of %d tokens, %.2f GiB",
        source,
        num_blocks,
        block_size,
        num_blocks * block_num_bytes / GIB,
    )
    return num_blocks


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


def choose_num_swap_blocks(config: EngineConfig, *, block_num_bytes: int) -> int:
    """Blocks that host memory may take of preempted requests."""
    is_cpu = jax.default_backend() == "cpu"
    if config.preemption_mode == "recompute":
        return 0
    if config.swap_space is not None:
        num_bytes = int(config.swap_space * GIB)
    elif is_cpu and config.preemption_mode == "auto":
        # The pool is in that memory itself: better have a larger one.
        return 0
    else:
        num_bytes = min(DEFAULT_SWAP_BYTES, host_memory_bytes() // 8)
    return num_bytes // block_num_bytes


def fit_max_model_len(
    config: EngineConfig, num_blocks: int, wanted: int, *, block_size: int
) -> int:
    """The context limit: `wanted`, or what one request alone can use of the pool.

    Whoever chose both the limit and the number of blocks keeps them: prompts that do not fit the
    pool are refused one by one.
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
