"""Compile for TPUs on a machine that has none."""

import math
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.stages import Compiled

needs_libtpu = pytest.mark.skipif(
    find_spec("libtpu") is None,
    reason="needs libtpu, which compiles for TPUs: pip install '.[tpu-test]'",
)
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def mesh_of(chip: str) -> Mesh:
    """One chip, along the axis 'tp'."""
    return Mesh(whole_mesh(TOPOLOGIES[chip]).devices[:1], ("tp",))


@cache
def whole_mesh(topology: str) -> Mesh:
    """All chips of a topology such as v5e:2x4, along the axis 'tp'."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # or libtpu asks the network what machine this is
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # processes that only compile share no chip
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return Mesh(np.array(described.devices), ("tp",))


def compile_for(mesh: Mesh, function: Callable, *arguments: Any, **jit_options: Any) -> Compiled:
    """`arguments` are abstract arrays on `mesh`. Fails if a kernel's memory does not suffice."""
    with jax.set_mesh(mesh):  # Pallas asks the mesh which chip it lowers for
        traced = jax.jit(function, **jit_options).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",)).compile()


def kernels_of(compiled: Compiled) -> set[str]:
    return set(
        re.findall(r"%(\w+)\.\d+ = .*custom_call_target=\"tpu_custom_call\"", text(compiled))
    )


def vector_memory_of(compiled: Compiled) -> dict[str, int]:
    """Bytes of vector memory that each kernel uses, by its name."""
    sizes = re.findall(
        r'%(\w+)\.\d+ = .*custom_call_target="tpu_custom_call".*"used_scoped_memory_configs":'
        r'\[\{"memory_space":"1","offset":"0","size":"(\d+)"',
        text(compiled),
    )
    return {name: int(size) for name, size in sizes}


def check_pool_stays_in_place(
    compiled: Compiled, shape: Sequence[int], dtype: str, num_pools: int = 1
) -> None:
    """shape: of one pool on one chip. Nothing makes an array of its size but a kernel, which has
    it among several results and where the pool was, or else a scatter."""
    num_bytes = math.prod(shape) * jnp.dtype(dtype).itemsize
    makers = pool_makers(compiled, shape)
    by_scatter = {"scatter", "fusion"} if "scatter" in makers else set()
    assert makers <= {"parameter", "get-tuple-element", "bitcast"} | by_scatter, makers
    memory = compiled.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= num_pools * num_bytes, memory
    # A layer's copies ahead of time have pointers of their own, each on a page of 16 KiB.
    assert memory.temp_size_in_bytes < num_bytes // 8 + (num_pools << 20), memory


def pool_makers(compiled: Compiled, shape: Sequence[int]) -> set[str]:
    """The operations that make an array of as many numbers as the pool has."""
    arrays = re.findall(r"= \w+\[([\d,]+)\]\S* (\w[\w-]*)\(", text(compiled))
    size = math.prod(shape)
    return {name for sizes, name in arrays if math.prod(map(int, sizes.split(","))) == size}


def text(compiled: Compiled) -> str:
    return compiled.as_text() or ""
