"""From engine options to an engine that is ready: files, weights, memory, programs."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.config import NO_GENERATION_CONFIG, EngineConfig
from jpaged.engine import Engine
from jpaged.execution.attention_choice import choose_attention, choose_block_size
from jpaged.execution.kv_cache import (
    MemoryBudget,
    choose_num_blocks,
    choose_num_swap_blocks,
    device_memory_limit,
    fit_max_model_len,
    fit_pool,
    kv_cache_spec,
    wanted_model_len,
)
from jpaged.execution.kv_scales import with_kv_scales
from jpaged.execution.programs import (
    ProgramSpec,
    compile_programs,
    largest_programs,
    temporary_bytes,
)
from jpaged.execution.runner import Runner
from jpaged.inputs import InputProcessor
from jpaged.metrics import Metrics
from jpaged.models.loading import Model, load_model
from jpaged.models.tied_head import with_stored_head
from jpaged.progress import Progress
from jpaged.startup.cache_folder import user_cache_folder
from jpaged.startup.generation import answer_end_ids, sampling_defaults
from jpaged.startup.model_files import (
    load_generation_config,
    load_model_config,
    load_tokenizer,
    open_weights,
    resolve_model,
)
from jpaged.text.tokenizer import Tokenizer
from pallas_kernels.paged_attention import PagedAttention

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedEngine:
    """An engine, and what its front doors need to know of the model.

    sampling_defaults: arguments of `SamplingParams` for requests that do not give them.
    """

    engine: Engine
    model_name: str
    tokenizer: Tokenizer | None
    max_model_len: int
    sampling_defaults: dict[str, Any]


def load_engine(config: EngineConfig, *, progress: Progress | None = None) -> LoadedEngine:
    """Load a model and compile its programs. What needs no weights is checked before any is read.

    progress: through which another thread may cancel this. Raises `JpagedError`.
    """
    progress = progress or Progress()
    files = resolve_model(config.model)
    model_config = load_model_config(files)
    model_name = config.served_model_name or files.name
    max_model_len = wanted_model_len(config, model_config)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(files)
    generation = load_generation_config(files, config.generation_config)
    end_ids = answer_end_ids(model_config, generation, tokenizer)
    defaults = sampling_defaults(
        generation, is_used=config.generation_config != NO_GENERATION_CONFIG
    )
    use_compilation_cache(config)
    dtype = compute_dtype(config)
    kv_dtype = kv_cache_dtype(config, dtype)
    attention = choose_attention(config, model_config, kv_dtype, jax.local_devices()[0])
    source = open_weights(files)
    model = load_model(with_stored_head(model_config, source), source, dtype, progress)
    model = with_kv_scales(model, kv_dtype)
    spec, max_model_len = plan_memory(config, model, attention, max_model_len)
    with progress.bar(spec.num_programs, "compiling", unit="") as advance:
        programs = compile_programs(spec, advance=advance)
    inputs = InputProcessor(
        tokenizer,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=end_ids,
    )
    engine = Engine(
        Runner(spec, programs),
        inputs,
        Metrics(model_name=model_name, max_model_len=max_model_len),
        enable_prefix_caching=config.enable_prefix_caching,
        preemption_mode=config.preemption_mode,
        check_invariants=config.check_invariants,
    )
    return LoadedEngine(engine, model_name, tokenizer, max_model_len, defaults)


def compute_dtype(config: EngineConfig) -> jnp.dtype:
    """XLA's bfloat16 matmuls are many times slower than float32 ones on CPUs."""
    if config.dtype == "auto":
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return jnp.dtype(config.dtype)


def kv_cache_dtype(config: EngineConfig, compute: jnp.dtype) -> jnp.dtype:
    return compute if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype)


def use_compilation_cache(config: EngineConfig) -> None:
    """Keep every compiled program on disk, however small: a start then only reads them."""
    folder = config.compilation_cache_dir or str(user_cache_folder() / "programs")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def plan_memory(
    config: EngineConfig, model: Model, attention: PagedAttention, max_model_len: int
) -> tuple[ProgramSpec, int]:
    """What to compile and the context limit that the memory allows."""
    kv_dtype = kv_cache_dtype(config, model.dtype)
    block_size = choose_block_size(config, attention, model.config, kv_dtype)
    make_kv_cache = partial(kv_cache_spec, model.config, attention, kv_dtype, block_size=block_size)
    spec = ProgramSpec(
        model=model,
        attention=attention,
        kv_cache=make_kv_cache(num_blocks=1),
        num_slots=config.max_num_seqs,
        bucket_growth=config.bucket_growth,
        max_num_tokens=config.max_num_batched_tokens,
        num_table_blocks=-(-max_model_len // block_size),
        seed=config.seed,
    )
    budget = MemoryBudget(
        limit=device_memory_limit(),
        utilization=config.gpu_memory_utilization,
        weights=model.num_bytes,
        programs=measured_program_bytes(spec) if must_measure(config) else 0,
    )
    block_num_bytes = spec.kv_cache.block_bytes
    num_blocks = choose_num_blocks(
        config,
        budget,
        block_size=block_size,
        block_num_bytes=block_num_bytes,
        max_model_len=max_model_len,
    )
    num_blocks = fit_pool(config, attention, make_kv_cache(num_blocks=num_blocks))
    max_model_len = fit_max_model_len(config, num_blocks, max_model_len, block_size=block_size)
    spec = replace(
        spec,
        kv_cache=make_kv_cache(num_blocks=num_blocks),
        num_table_blocks=-(-max_model_len // block_size),
        num_swap_blocks=choose_num_swap_blocks(config, block_num_bytes=block_num_bytes),
    )
    return spec, max_model_len


def must_measure(config: EngineConfig) -> bool:
    """Whether the pool's size depends on what programs need. On a CPU the cache takes a fixed
    share of the memory, next to which the programs' few megabytes do not count."""
    is_given = config.kv_cache_memory_bytes or config.num_gpu_blocks_override
    return not is_given and jax.default_backend() != "cpu"


def measured_program_bytes(spec: ProgramSpec) -> int:
    """Temporary memory of the largest programs, which does not depend on the pool's size."""
    return max(temporary_bytes(lowered.compile()) for lowered in largest_programs(spec))
