"""Compile for NVIDIA cards on a machine that has none, and read the code that they would run."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered

needs_cuda_plugin = pytest.mark.skipif(
    find_spec("jax_plugins") is None or find_spec("jax_plugins.xla_cuda12") is None,
    reason="needs jax-cuda12-plugin",
)

# What XLA asks a card for, as a `GpuTargetConfigProto`.
CARD = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory} threads_per_core_limit: 2048
  core_count: {cores} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} shared_memory_per_block_optin: {shared_memory_optin}
  cuda_compute_capability {{ major: {capability} minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  name: "{name}" driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""
CARDS = {
    "A100": dict(
        name="NVIDIA A100-SXM4-80GB",
        cores=108,
        fpus=64,
        capability=8,
        clock=1.41,
        bandwidth=2039040000000,
        memory=85100068864,
        l2_cache=41943040,
        shared_memory=167936,
        shared_memory_optin=166912,
    ),
    "H100": dict(
        name="NVIDIA H100 80GB HBM3",
        cores=132,
        fpus=128,
        capability=9,
        clock=1.98,
        bandwidth=3352320000000,
        memory=84929347584,
        l2_cache=52428800,
        shared_memory=233472,
        shared_memory_optin=232448,
    ),
}


def mesh_of(card: str, num_cards: int = 1) -> Mesh:
    """Cards of one machine along the axis 'tp'."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=CARD.format(**CARDS[card]),
        topology=f"1x1x{num_cards}",
    )
    return Mesh(np.array(topology.devices), ("tp",))


def on(mesh: Mesh, shape: Sequence[int], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
    """An abstract array, whose axes are split over those of the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


@dataclass(frozen=True)
class GpuProgram:
    """A compiled program and the folder of what XLA wrote down about it."""

    compiled: Compiled
    folder: Path

    @cached_property
    def kernels(self) -> dict[str, str]:
        """PTX of each kernel, by name."""
        kernels = {}
        for path in self.folder.glob("*.ptx"):
            text = path.read_text()
            for name in re.findall(r"\.visible \.entry (\w+)\(", text):
                kernels[name] = text
        return kernels

    @cached_property
    def launches(self) -> list[str]:
        """The launch sequence, a line for each thunk; what is in a command buffer is indented."""
        names = ("*thunk_sequence_after_thunk_passes.txt", "*thunk_sequence.txt")
        paths = [path for name in names for path in self.folder.glob(name)]
        return paths[0].read_text().splitlines()

    def check_is_one_command_buffer(self) -> None:
        """What the host launches is one graph."""
        outermost = [line for line in self.launches if not line.startswith(" ")]
        assert len(outermost) == 1 and "kCommandBuffer" in outermost[0], outermost

    def check_pool_stays_in_place(self, shape: Sequence[int], num_pools: int) -> None:
        """shape: of one bfloat16 pool on one card. Nothing but scatters makes such an array."""
        pattern = rf"= bf16\[{','.join(map(str, shape))}\]\S* (\w[\w-]*)\("
        makers = re.findall(pattern, self.compiled.as_text())
        assert makers.count("scatter") == num_pools, makers
        assert set(makers) <= {"parameter", "scatter", "fusion", "get-tuple-element"}, set(makers)
        pool_bytes = 2 * int(np.prod(shape))
        memory = self.compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= num_pools * pool_bytes, memory
        assert memory.temp_size_in_bytes < pool_bytes, memory


def lower_for(mesh: Mesh, function: Callable, *arguments: Any, **jit_options: Any) -> Lowered:
    """`arguments` are abstract arrays on `mesh`."""
    with jax.set_mesh(mesh):  # Pallas asks the mesh which card it lowers for
        traced = jax.jit(function, **jit_options).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",))


def compile_lowered(lowered: Lowered, folder: Path, **more_options: str | bool) -> GpuProgram:
    """Fails if a kernel keeps values in memory because the registers do not suffice."""
    options = {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_dump_emitter_re": "ptx",
        "xla_gpu_fail_ptx_compilation_on_register_spilling": True,
    }
    return GpuProgram(lowered.compile(compiler_options=options | more_options), folder)
