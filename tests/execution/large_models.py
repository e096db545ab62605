"""Large models on hardware that is not there, planned and lowered as the product does it."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from jpaged.config import EngineConfig
from jpaged.execution.programs import ProgramSpec, lower_forward, lower_sample
from jpaged.models.config import ModelConfig
from jpaged.startup.engine_plan import EnginePlan, plan_engine
from jpaged.target import described_target

LLAMA_3_8B = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
)
LLAMA_3_70B = replace(
    LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)
TOKENS_OF_A_CHUNK = 2048


def plan_on(
    description: str, devices: Sequence[Any], config: ModelConfig, **options: Any
) -> EnginePlan:
    """Plan an engine on devices of a topology. Nothing is measured: `options` size the pool."""
    target = replace(described_target(description), devices=tuple(devices))
    limits = {"max_num_batched_tokens": TOKENS_OF_A_CHUNK, "max_model_len": 4096}

    def refuse(lowered: Lowered) -> Compiled:
        raise AssertionError("a given size of the pool needs no program")

    engine_config = EngineConfig(**(limits | options))
    return plan_engine(engine_config, config, target, compile_program=refuse)


def lower_decode(spec: ProgramSpec) -> Lowered:
    return _lower(spec, spec.num_slots, decode_only=True)


def lower_mixed(spec: ProgramSpec) -> Lowered:
    return _lower(spec, spec.max_num_tokens, decode_only=False)


def lower_sampling(spec: ProgramSpec) -> Lowered:
    assert spec.mesh is not None
    with jax.set_mesh(spec.mesh):
        return lower_sample(spec, spec.num_slots)


def _lower(spec: ProgramSpec, num_tokens: int, *, decode_only: bool) -> Lowered:
    assert spec.mesh is not None
    with jax.set_mesh(spec.mesh):  # Pallas asks the mesh which device it lowers for
        return lower_forward(spec, spec.forward_shape(num_tokens, decode_only=decode_only))


def pool_shape_on_device(spec: ProgramSpec) -> tuple[int, ...]:
    cache = spec.kv_cache
    assert cache.sharding is not None
    return cache.sharding.shard_shape(cache.layer_shape)


def num_donated(compiled: Compiled) -> int:
    """Number of arrays that a program gives back in the memory that it got them in."""
    header, _, _ = (compiled.as_text() or "").partition("\n")
    return len(re.findall(r"\{[\d, ]*\}: \(\d+, \{[\d, ]*\}, (?:may|must)-alias\)", header))


def check_collectives(compiled: Compiled, config: ModelConfig) -> None:
    """Devices wait for each other after the embedding, and twice a layer."""
    names = r" (all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-\w+)"
    found = Counter(re.findall(rf"{names}(?:-start)?\(", compiled.as_text() or ""))
    assert set(found) == {"all-reduce"} and found["all-reduce"] <= 2 * config.num_layers + 1, found


def total_bytes(compiled: Compiled) -> int:
    """All memory that a device needs while the program runs."""
    memory = compiled.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    code = memory.generated_code_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + made + code
