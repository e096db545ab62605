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


@cache
def mesh_of(chip: str) -> Mesh:
    """One chip, along the axis 'tp'."""
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # or libtpu asks the network what machine this is
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # processes that only compile share no chip
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return Mesh(np.array(topology.devices[:1]), ("tp",))


def compile_for(mesh: Mesh, function: Callable, *arguments: Any, **jit_options: Any) -> Compiled:
    """`arguments` are abstract arrays on `mesh`. Fails if a kernel's memory does not suffice."""
    with jax.set_mesh(mesh):  # Pallas asks the mesh which chip it lowers for
        traced = jax.jit(function, **jit_options).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",)).compile()


def kernels_of(compiled: Compiled) -> set[str]:
    return set(
        re.findall(r"%(\w+)\.\d+ = .*custom_call_target=\"tpu_custom_call\"", text(compiled))
    )


def check_pool_stays_in_place(compiled: Compiled, shape: Sequence[int], dtype: str) -> None:
    """Nothing but a kernel makes an array of the pool's size, and that is where the pool was."""
    num_rows, num_bytes = math.prod(shape[:-1]), math.prod(shape) * jnp.dtype(dtype).itemsize
    sizes = f"{','.join(map(str, shape))}|{num_rows},{shape[-1]}"
    makers = set(re.findall(rf"= \w+\[(?:{sizes})\]\S* (\w[\w-]*)\(", text(compiled)))
    assert makers <= {"parameter", "custom-call", "get-tuple-element"}, makers
    memory = compiled.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= num_bytes, memory
    assert memory.temp_size_in_bytes < num_bytes // 8, memory


def text(compiled: Compiled) -> str:
    return compiled.as_text() or ""
