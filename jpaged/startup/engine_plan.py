"""All that a start decides before it reads a weight: from options, a model's config and a target.

The hardware need not be there: a target may be described, and programs compiled for it.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.execution.attention_choice import choose_attention
from jpaged.execution.device_mesh import device_mesh
from jpaged.execution.programs import CompileProgram, ProgramSpec
from jpaged.models.config import ModelConfig
from jpaged.models.loading import abstract_model
from jpaged.models.sharding import split_config
from jpaged.startup.device_memory import device_memory
from jpaged.startup.memory_plan import plan_memory, wanted_model_len
from jpaged.startup.step_limits import step_limits
from jpaged.target import Target


@dataclass(frozen=True)
class EnginePlan:
    """What is compiled and allocated. spec: its model is abstract.

    kv_dtype: of the KV cache. max_model_len: the context limit, as far as the memory allows it.
    """

    spec: ProgramSpec
    kv_dtype: jnp.dtype
    max_model_len: int


def plan_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    target: Target,
    *,
    compile_program: CompileProgram,
) -> EnginePlan:
    """Plan an engine on all devices of a target.

    model_config: of the whole model. compile_program: compiles the programs whose temporary
    memory decides how large the KV cache can be. Raises `ConfigError` for what cannot work.
    """
    wanted_len = wanted_model_len(config, model_config)
    split = split_config(model_config, target.num_devices)
    dtype = compute_dtype(config, target)
    kv_dtype = kv_cache_dtype(config, dtype)
    spec, max_model_len = plan_memory(
        config,
        target,
        abstract_model(split, dtype, device_mesh(target)),
        choose_attention(config, split, kv_dtype, target),
        step_limits(config, target.platform),
        device_memory(target, config.gpu_memory_utilization),
        compile_program=compile_program,
        kv_dtype=kv_dtype,
        max_model_len=wanted_len,
    )
    return EnginePlan(spec, kv_dtype, max_model_len)


def compute_dtype(config: EngineConfig, target: Target) -> jnp.dtype:
    """XLA's bfloat16 matmuls are many times slower than float32 ones on CPUs."""
    if config.dtype == "auto":
        return jnp.dtype("float32" if target.is_cpu else "bfloat16")
    return jnp.dtype(config.dtype)


def kv_cache_dtype(config: EngineConfig, compute: jnp.dtype) -> jnp.dtype:
    return compute if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype)
