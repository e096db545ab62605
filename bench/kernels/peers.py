"""What the benchmark of kernels compares ours with: other ways to compute the same."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jpaged.bench.kernels.cases import Case, CaseInputs
from jpaged.bench.kernels.contenders import (
    Contender,
    MakeContender,
    NotApplicable,
    chained,
    run_all,
)
from jpaged.bench.kernels.reference import dense_attention

# The bundled kernel's own defaults: pages a split must be a multiple of these.
BUNDLED_SPLITS, BUNDLED_PAGES = 16, 8


def gather_dense(case: Case, inputs: CaseInputs) -> Contender:
    at_once = max(case.num_decodes, 1)
    attend = partial(dense_attention, case, inputs, dtype=case.dtype, num_rows_at_once=at_once)
    run = chained(attend)
    return Contender("gather-dense", lambda: run_all(partial(run, inputs.query), inputs.pools))


def bundled_for_gpus(case: Case, inputs: CaseInputs) -> Contender:
    """Make a contender of JAX's own kernel for GPUs, over pools in its layout."""
    if jax.default_backend() != "gpu":
        raise NotApplicable("runs on GPUs only")
    if not case.decode_only:
        raise NotApplicable("has no prefill")
    if case.window is not None or case.shape.has_sinks:
        raise NotApplicable("has neither windows nor sinks")
    if case.pool_dtype.itemsize == 1:
        raise NotApplicable("has scales of tokens, not of heads")
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    num_columns = inputs.block_tables.shape[1]
    padding = -num_columns % (BUNDLED_SPLITS * BUNDLED_PAGES)
    tables = jnp.array(np.pad(inputs.block_tables, ((0, 0), (0, padding))))
    lengths = jnp.array(inputs.context_lens)
    split = jax.jit(
        lambda pool: tuple(pool[:, :, first::2].transpose(2, 0, 1, 3) for first in (0, 1))
    )
    pages = [split(pool) for pool in inputs.pools]
    query = (inputs.query * case.shape.score_scale).astype(case.dtype)

    def attend(query: Array, pages: tuple[Array, Array]) -> Array:
        return paged_attention(
            query, *pages, tables, lengths, attn_logits_soft_cap=case.shape.softcap
        )

    run = chained(attend)
    return Contender("jax-paged-attention", lambda: run(query, pages))


def bundled_for_tpus(case: Case, inputs: CaseInputs) -> Contender:
    """Make a contender of JAX's own kernel for TPUs.

    Its pools are laid out as ours for other devices, with heads filled up to whole registers. It
    takes the sizes that it has measured or chosen itself.
    """
    if jax.default_backend() != "tpu":
        raise NotApplicable("runs on TPUs only")
    if case.shape.has_sinks:
        raise NotApplicable("has no sinks")
    if case.pool_dtype.itemsize == 1:
        raise NotApplicable("has scales of all heads, not of each")
    fill_up = jax.jit(partial(_fill_lanes, lanes=pltpu.get_tpu_info().num_lanes))
    query, *pools = (fill_up(array) for array in (inputs.query, *inputs.pools))
    run = chained(ragged_attention(case, inputs))
    return Contender("jax-ragged-attention", lambda: run(query, pools))


def ragged_attention(case: Case, inputs: CaseInputs) -> Callable[[Array, Array], Array]:
    """Make the call of JAX's kernel; heads of queries and pool are filled up to whole registers."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    rows = (
        jnp.array(inputs.context_lens),
        jnp.array(inputs.block_tables),
        jnp.array(inputs.query_starts),
        jnp.array([len(case.rows)], jnp.int32),
    )
    options = {
        "sm_scale": case.shape.score_scale,
        "sliding_window": case.window,
        "soft_cap": case.shape.softcap,
        # Its own choices of sizes need more than XLA grants a kernel unasked.
        "vmem_limit_bytes": pltpu.get_tpu_info().vmem_capacity_bytes * 7 // 8,
    }

    def attend(query: Array, pool: Array) -> Array:
        return ragged_paged_attention(query, pool, *rows, **options)[:, :, : case.shape.head_dim]

    return attend


def _fill_lanes(array: Array, *, lanes: int) -> Array:
    fill = [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % lanes)]
    return jnp.pad(array, fill)


def torch_sdpa(case: Case, inputs: CaseInputs) -> Contender:
    """Make a contender of torch's own choice of attention, over K/V gathered beforehand."""
    if importlib.util.find_spec("torch") is None:
        raise NotApplicable("torch is not installed")
    if case.window is not None or case.shape.has_sinks or case.shape.softcap is not None:
        raise NotApplicable("has neither windows, sinks nor a softcap")
    (query_len, length), *others = set(case.rows)
    if others or query_len not in (1, length):
        raise NotApplicable("wants rows of one length, whole prompts or decodes")
    if case.pool_dtype.itemsize == 1:
        raise NotApplicable("has no K/V of one byte")
    import torch

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise NotApplicable("torch is there, but not for this GPU")
    device = "cuda" if on_gpu else "cpu"

    def to_torch(array: Array) -> Any:
        """Transpose [S, tokens, heads, D] to [S, heads, tokens, D]."""
        values = torch.from_numpy(np.array(array.astype(jnp.float32)))
        return values.to(device, getattr(torch, case.dtype.name)).transpose(1, 2).contiguous()

    def gather(pool: Array) -> tuple[Any, Any]:
        tokens = pool[inputs.block_tables].reshape(len(case.rows), -1, *pool.shape[2:])[:, :length]
        return to_torch(tokens[:, :, 0::2]), to_torch(tokens[:, :, 1::2])

    query = to_torch(inputs.query.reshape(len(case.rows), query_len, *inputs.query.shape[1:]))
    pairs = [gather(pool) for pool in inputs.pools]
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=query_len > 1,
        scale=case.shape.score_scale,
        enable_gqa=case.shape.group > 1,
    )

    def run() -> list[Any]:
        with torch.inference_mode():
            return [attend(query, key, value) for key, value in pairs]

    def wait(answers: Any) -> None:
        if on_gpu:
            torch.cuda.synchronize()

    return Contender("torch-sdpa", run, wait)


# In this order.
PEERS: dict[str, MakeContender] = {
    "gather-dense": gather_dense,
    "jax-paged-attention": bundled_for_gpus,
    "jax-ragged-attention": bundled_for_tpus,
    "torch-sdpa": torch_sdpa,
}
