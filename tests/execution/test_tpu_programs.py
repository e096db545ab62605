"""Whole steps of large models, compiled for TPUs that are not there."""

from dataclasses import asdict

import pytest
from jax.sharding import Mesh
from jax.stages import Compiled

from jpaged.execution.slot_state import SlotState
from jpaged.models.config import ModelConfig
from pallas_kernels.paged_attention import MosaicPagedAttention
from pallas_kernels.paged_attention.mosaic_sizes import chip_sizes
from tests.execution.large_models import (
    DONATED,
    LLAMA_3_8B,
    LLAMA_3_70B,
    Step,
    check_collectives,
    num_donated,
)
from tests.kernels.tpu_compiler import (
    check_pool_stays_in_place,
    compile_for,
    needs_libtpu,
    whole_mesh,
)

pytestmark = needs_libtpu

GIB = 1 << 30
CHIP_BYTES = {"v5e": 15.75 * GIB, "v6e": 31.24 * GIB}  # what libtpu leaves to programs


def total_bytes(compiled: Compiled) -> int:
    """All memory that a chip needs while the program runs."""
    memory = compiled.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    code = memory.generated_code_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + made + code


def mosaic(config: ModelConfig, mesh: Mesh) -> MosaicPagedAttention:
    """With the sizes that the chips get."""
    kv_heads = max(config.num_kv_heads // mesh.size, 1)
    return MosaicPagedAttention(
        num_kv_heads=kv_heads,
        group=config.num_heads // mesh.size // kv_heads,
        head_dim=config.head_dim,
        **asdict(chip_sizes(mesh.devices.flat[0].device_kind)),
    )


@pytest.mark.parametrize(
    "topology,config,batch,num_tokens",
    [
        pytest.param("v5e:2x4", LLAMA_3_8B, 128, 128, id="8b-v5e", marks=pytest.mark.slow),
        pytest.param("v6e:2x2", LLAMA_3_8B, 128, 128, id="8b-v6e", marks=pytest.mark.long),
        pytest.param("v5e:2x4", LLAMA_3_8B, 128, 2048, id="8b-mixed", marks=pytest.mark.long),
        pytest.param("v5e:4x4", LLAMA_3_70B, 32, 32, id="70b-v5e", marks=pytest.mark.long),
        pytest.param("v6e:2x4", LLAMA_3_70B, 64, 64, id="70b-v6e", marks=pytest.mark.long),
    ],
)
def test_step_of_a_large_model(topology, config, batch, num_tokens):
    """The pool in place, all of it within the chips' memory, and no collective but the sums."""
    mesh = whole_mesh(topology)
    step = Step(
        config=config,
        attention=mosaic(config, mesh),
        pool_axis=1,
        batch=batch,
        context=4096,
        num_tokens=num_tokens,
    )
    forward, arguments = step.on(mesh)
    compiled = compile_for(mesh, forward, *arguments, donate_argnums=DONATED, keep_unused=True)
    [pool, *_] = arguments[1]
    pool_shape = pool.sharding.shard_shape(pool.shape)
    check_pool_stays_in_place(compiled, pool_shape, "bfloat16", config.num_layers)
    assert num_donated(compiled) == config.num_layers + len(SlotState._fields)
    check_collectives(compiled, config)
    assert total_bytes(compiled) <= CHIP_BYTES[topology.split(":")[0]]
