"""Pallas through Triton: the one module that knows JAX's names for it.

JAX has deprecated this lowering, which is its only one for A100. Another lowering can be put beside
it: nothing else here depends on it, and `supports` of a backend says what it can do.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

dot = plgpu.dot
load = plgpu.load
store = plgpu.store

warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)


def triton_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int = 1,
    aliases: dict[int, int] | None = None,
    interpret: bool,
) -> Callable[..., Sequence[jax.Array]]:
    """Make a function of a kernel whose arguments are whole arrays, outputs last.

    aliases: input number -> number of the output that is the same memory.
    """
    whole = pl.BlockSpec(memory_space=pl.ANY)

    def call(*arrays: jax.Array) -> Any:
        # Without these parameters JAX may choose another lowering.
        params = plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages)
        return pl.pallas_call(
            kernel,
            name=name,
            grid=grid,
            in_specs=[whole] * len(arrays),
            out_specs=[whole] * len(out_shape),
            out_shape=list(out_shape),
            input_output_aliases=aliases or {},
            compiler_params=params,
            interpret=interpret,
        )(*arrays)

    return call
