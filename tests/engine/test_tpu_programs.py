"""Whole steps of large models, compiled for TPUs that are not there."""

import time
from dataclasses import asdict, dataclass
from functools import cache

import pytest
from jax.sharding import Mesh
from jax.stages import Compiled

from jpaged.models.config import ModelConfig
from pallas_kernels.paged_attention import MosaicPagedAttention
from pallas_kernels.paged_attention.mosaic_sizes import chip_sizes
from tests.engine.large_models import LLAMA_3_8B, LLAMA_3_70B, Step, check_collectives
from tests.kernels.bundled_tpu_attention import BundledTpuAttention
from tests.kernels.tpu_compiler import (
    check_pool_stays_in_place,
    compile_for,
    needs_libtpu,
    whole_mesh,
)

pytestmark = needs_libtpu

GIB = 1 << 30
CHIP_BYTES = {"v5e": 15.75 * GIB, "v6e": 31.24 * GIB}  # what libtpu leaves to programs
# The sizes that the kernel takes where it knows no better ones.
BUNDLED = BundledTpuAttention(fetch_blocks=128, tile_tokens=32)


@dataclass(frozen=True)
class CompiledStep:
    """seconds: of all threads, as other processes may run."""

    compiled: Compiled
    pool_shape: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        memory = self.compiled.memory_analysis()
        return (
            f"{self.seconds:.1f} s; bytes a chip: arguments {memory.argument_size_in_bytes:,}, "
            f"temporary {memory.temp_size_in_bytes:,}, output {memory.output_size_in_bytes:,}, "
            f"of which in place {memory.alias_size_in_bytes:,}, "
            f"code {memory.generated_code_size_in_bytes:,}"
        )

    @property
    def pool_bytes(self) -> int:
        """All that is updated in place. Sizes of sink blocks differ."""
        return self.compiled.memory_analysis().alias_size_in_bytes

    @property
    def temporary_bytes(self) -> int:
        return self.compiled.memory_analysis().temp_size_in_bytes

    @property
    def total_bytes(self) -> int:
        memory = self.compiled.memory_analysis()
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


@cache
def compile_step(
    topology: str, config: ModelConfig, batch: int, num_tokens: int, is_bundled: bool = False
) -> CompiledStep:
    """Contexts of 4096 tokens. All parameters are arguments, also those of the last matmul, which
    another program does."""
    mesh = whole_mesh(topology)
    step = Step(
        config=config,
        attention=BUNDLED if is_bundled else mosaic(config, mesh),
        pool_axis=2 if is_bundled else 1,
        batch=batch,
        context=4096,
        num_tokens=num_tokens,
    )
    started = time.process_time()
    forward, arguments = step.on(mesh)
    compiled = compile_for(mesh, forward, *arguments, donate_argnums=1, keep_unused=True)
    seconds = time.process_time() - started
    [pool, *_] = arguments[1]
    return CompiledStep(compiled, pool.sharding.shard_shape(pool.shape), seconds)


@pytest.mark.parametrize(
    "topology,config,batch,num_tokens",
    [
        pytest.param("v5e:2x4", LLAMA_3_8B, 128, 128, id="8b-v5e"),
        pytest.param("v6e:2x2", LLAMA_3_8B, 128, 128, id="8b-v6e", marks=pytest.mark.slow),
        pytest.param("v5e:2x4", LLAMA_3_8B, 128, 2048, id="8b-mixed", marks=pytest.mark.long),
        pytest.param("v5e:4x4", LLAMA_3_70B, 32, 32, id="70b-v5e", marks=pytest.mark.slow),
        pytest.param("v6e:2x4", LLAMA_3_70B, 64, 64, id="70b-v6e", marks=pytest.mark.long),
    ],
)
def test_step_of_a_large_model(topology, config, batch, num_tokens):
    """The pool in place, all of it within the chips' memory, and no collective but the sums."""
    step = compile_step(topology, config, batch, num_tokens)
    print(step)
    check_pool_stays_in_place(step.compiled, step.pool_shape, "bfloat16", config.num_layers)
    check_collectives(step.compiled, config)
    assert step.total_bytes <= CHIP_BYTES[topology.split(":")[0]]


@pytest.mark.slow
def test_no_more_than_the_kernel_that_comes_with_jax():
    """Less memory, and compiling takes about as long at most."""
    case = "v5e:2x4", LLAMA_3_8B, 128, 128
    ours, theirs = compile_step(*case), compile_step(*case, is_bundled=True)
    print(f"ours:   {ours}\ntheirs: {theirs}")
    assert ours.total_bytes - ours.pool_bytes <= theirs.total_bytes - theirs.pool_bytes
    assert ours.temporary_bytes <= theirs.temporary_bytes
    assert ours.seconds <= 1.5 * theirs.seconds
