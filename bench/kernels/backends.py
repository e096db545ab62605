"""Our backends as contenders of the benchmark of kernels."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from jpaged.bench.kernels.cases import Case, CaseInputs
from jpaged.bench.kernels.contenders import Contender, NotApplicable, chained, run_all
from jpaged.config import EngineConfig
from jpaged.execution.attention_choice import (
    PLATFORM_BACKENDS,
    choose_block_size,
    make_backend,
    reason_against,
    with_measured_sizes,
)
from jpaged.target import detect_target
from pallas_kernels.paged_attention import PagedAttention
from pallas_kernels.testing import AttentionShape

BACKENDS = ("triton", "pallas-tpu", "xla")


def default_block_size(config: EngineConfig, shape: AttentionShape, pool_dtype: jnp.dtype) -> int:
    """Block size that an engine chooses on this machine's first device."""
    target = detect_target()
    attention = make_backend(PLATFORM_BACKENDS.get(target.platform, "xla"), shape, target)
    return choose_block_size(config, attention, shape, pool_dtype)


def backend_contender(name: str, case: Case, inputs: CaseInputs, *, tuning_file: Path) -> Contender:
    """Make a contender of a backend, with the sizes that an engine takes on the first device.

    Raises `NotApplicable`, on a CPU for all kernels: the time of an interpreter says nothing.
    """
    attention = backend_for(name, case)
    target = detect_target()
    attention = with_measured_sizes(
        attention, tuning_file, case.shape, target, case.pool_dtype, case.block_size
    )
    return attention_contender(attention, case, in_layout_of(attention, inputs))


def backend_for(name: str, case: Case) -> PagedAttention:
    """Make a backend with unmeasured sizes. Raises `NotApplicable`."""
    target = detect_target()
    attention = make_backend(name, case.shape, target)
    reason = reason_against(attention, target, case.pool_dtype, case.block_size)
    if reason is not None:
        raise NotApplicable(reason)
    return attention


def in_layout_of(attention: PagedAttention, inputs: CaseInputs) -> CaseInputs:
    """Convert the pools to the backend's layout."""
    num_blocks, block_size, num_heads, head_dim = inputs.poisoned.shape
    pool_shape = attention.pool_shape(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_heads // 2,
        head_dim=head_dim,
    )
    if pool_shape == inputs.poisoned.shape:
        return inputs

    def convert(pool: Num[Array, "N B K2 D"]) -> Array:
        tokens = pool.reshape(-1, num_heads, head_dim)
        # Exact: bfloat16 has all numbers of one byte.
        tokens = tokens.astype(jnp.bfloat16) if pool.dtype.itemsize == 1 else tokens
        slots = jnp.arange(len(tokens), dtype=jnp.int32)
        key, value = tokens[:, 0::2], tokens[:, 1::2]
        return attention.write(jnp.zeros(pool_shape, pool.dtype), key, value, slots)

    convert = jax.jit(convert)
    pools = [convert(pool) for pool in inputs.pools]
    return replace(inputs, pools=pools, poisoned=convert(inputs.poisoned))


def attention_contender(attention: PagedAttention, case: Case, inputs: CaseInputs) -> Contender:
    """Make a contender of a backend. inputs: with pools in the backend's layout."""

    def attend(query: Array, pools: list[Array], metadata: Any, options: dict[str, Array]) -> Any:
        plan = attention.plan(
            metadata,
            num_tokens=case.num_tokens,
            block_size=case.block_size,
            decode_only=case.decode_only,
        )
        scale, softcap = case.shape.score_scale, case.shape.softcap

        def attend_one(query: Array, pool: Array) -> Array:
            return attention.attend(query, pool, plan, scale=scale, softcap=softcap, **options)

        return chained(attend_one)(query, pools)

    run, arguments = jax.jit(attend), (inputs.metadata, inputs.options)
    return Contender(
        attention.name,
        lambda: run_all(lambda pools: run(inputs.query, pools, *arguments), inputs.pools),
        run_poisoned=lambda: run(inputs.query, [inputs.poisoned], *arguments)[0],
    )
