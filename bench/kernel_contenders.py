"""What the benchmark of kernels runs on a case: our backends, and peers that are there."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Num

from jpaged.attention_choice import compute_capability
from jpaged.bench.kernel_cases import BLOCK_SIZE, Case, CaseInputs
from pallas_kernels.paged_attention import (
    PagedAttention,
    TritonPagedAttention,
    XlaPagedAttention,
)

# The bundled kernel's own defaults: pages a split must be a multiple of these.
BUNDLED_SPLITS, BUNDLED_PAGES = 16, 8


class NotApplicable(Exception):
    """Why a contender cannot run a case."""


@dataclass(frozen=True)
class Contender:
    """run: attends over every pool of the inputs, and returns the answers without waiting.

    run_poisoned: the answer over the poisoned pool; None for peers, who may read what is not there.
    """

    name: str
    run: Callable[[], list[Any]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    run_poisoned: Callable[[], Any] | None = None


def _chained(attend: Callable[[Array, Any], Array]) -> Callable[[Array, list[Any]], list[Array]]:
    """One program that attends over one pool after the other, as the layers of a step do."""

    def attend_all(query: Array, pools: list[Any]) -> list[Array]:
        answers = []
        for pool in pools:
            answers.append(attend(query, pool))
            query, _ = lax.optimization_barrier((query, answers[-1]))
        return answers

    return jax.jit(attend_all)


def _run_all(attend_all: Callable[[list[Any]], list[Any]], pools: list[Any]) -> list[Any]:
    """In one program on a GPU, whose launch would else show. CPUs take much longer than to launch,
    and long to compile."""
    if jax.default_backend() != "cpu":
        return attend_all(pools)
    return [answer for pool in pools for answer in attend_all([pool])]


def _triton(case: Case, inputs: CaseInputs) -> Contender:
    # On a CPU the kernels could only be interpreted, and the time of that says nothing.
    return _backend(
        TritonPagedAttention(group=case.shape.group, head_dim=case.shape.head_dim), case, inputs
    )


def _xla(case: Case, inputs: CaseInputs) -> Contender:
    return _backend(XlaPagedAttention(), case, inputs)


def _backend(attention: PagedAttention, case: Case, inputs: CaseInputs) -> Contender:
    device = jax.local_devices()[0]
    reason = attention.supports(
        block_size=BLOCK_SIZE,
        dtype=case.pool_dtype,
        platform=device.platform,
        compute_capability=compute_capability(device),
    )
    if reason is not None:
        raise NotApplicable(reason)

    def attend(query: Array, pools: list[Array], metadata: Any, options: dict[str, Array]) -> Any:
        plan = attention.plan(
            metadata,
            num_tokens=case.num_tokens,
            block_size=BLOCK_SIZE,
            decode_only=case.decode_only,
        )
        scale, softcap = case.shape.score_scale, case.shape.softcap

        def attend_one(query: Array, pool: Array) -> Array:
            return attention.attend(query, pool, plan, scale=scale, softcap=softcap, **options)

        return _chained(attend_one)(query, pools)

    run, arguments = jax.jit(attend), (inputs.metadata, inputs.options)
    return Contender(
        attention.name,
        lambda: _run_all(lambda pools: run(inputs.query, pools, *arguments), inputs.pools),
        run_poisoned=lambda: run(inputs.query, [inputs.poisoned], *arguments)[0],
    )


def dense_attention(
    case: Case,
    inputs: CaseInputs,
    query: Float[Array, "T H D"],
    pool: Num[Array, "N B K2 D"],
    *,
    dtype: jnp.dtype,
    num_rows_at_once: int,
) -> Float[Array, "T H D"]:
    """Gathers all tokens of the sequences, padded to the longest, and attends over all of them:
    what one would write without paged attention, and in float32 the reference of all answers.

    num_rows_at_once: of decodes; chunks of prompts come one after the other.
    """
    step, num_decodes = num_rows_at_once, case.num_decodes
    groups = [range(row, min(row + step, num_decodes)) for row in range(0, num_decodes, step)]
    groups += [range(row, row + 1) for row in range(num_decodes, len(case.rows))]
    answers = []
    for rows in groups:
        first, query_len = inputs.query_starts[rows.start], case.rows[rows.start][0]
        chunk = query[first : first + query_len * len(rows)].astype(dtype)
        chunk = chunk.reshape(len(rows), query_len, *query.shape[1:])
        answer = _dense_rows(case, inputs, chunk, pool, slice(rows.start, rows.stop))
        answers.append(answer.reshape(-1, *query.shape[1:]))
    return jnp.concatenate(answers)


def _dense_rows(
    case: Case,
    inputs: CaseInputs,
    query: Float[Array, "S Q H D"],
    pool: Num[Array, "N B K2 D"],
    rows: slice,
) -> Float[Array, "S Q H D"]:
    (num_rows, query_len, _, head_dim), options = query.shape, inputs.options
    lengths = inputs.context_lens[rows]
    tables = inputs.block_tables[rows, : -(-lengths.max() // BLOCK_SIZE)]
    tokens = pool[tables].reshape(num_rows, -1, *pool.shape[2:]).astype(query.dtype)
    if "kv_scales" in options:
        tokens = tokens * options["kv_scales"].astype(query.dtype)[None, None, :, None]
    key, value = tokens[:, :, 0::2], tokens[:, :, 1::2]
    grouped = query.reshape(num_rows, query_len, case.shape.num_kv_heads, -1, head_dim)
    exact = {"precision": "highest", "preferred_element_type": jnp.float32}
    scores = jnp.einsum("sqkgd,slkd->skgql", grouped, key, **exact) * case.shape.score_scale
    if case.shape.softcap is not None:
        scores = case.shape.softcap * jnp.tanh(scores / case.shape.softcap)
    own = lengths[:, None] - query_len + np.arange(query_len)[None]
    distances = own[:, :, None] - np.arange(key.shape[1])[None, None]
    visible = (distances >= 0) & (distances < (case.window or key.shape[1]))
    scores = jnp.where(jnp.array(visible)[:, None, None], scores, -jnp.inf)
    weights = _softmax(scores, options.get("sinks"))
    answer = jnp.einsum("skgql,slkd->sqkgd", weights.astype(query.dtype), value, **exact)
    return answer.astype(query.dtype).reshape(query.shape)


def _softmax(
    scores: Float[Array, "S K G Q L"], sinks: Float[Array, "H"] | None
) -> Float[Array, "S K G Q L"]:
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    num_rows, num_kv_heads, group, query_len, _ = scores.shape
    sinks = sinks.astype(scores.dtype).reshape(1, num_kv_heads, group, 1, 1)
    sinks = jnp.broadcast_to(sinks, (num_rows, num_kv_heads, group, query_len, 1))
    return jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]


def _gather_dense(case: Case, inputs: CaseInputs) -> Contender:
    at_once = max(case.num_decodes, 1)
    attend = partial(dense_attention, case, inputs, dtype=case.dtype, num_rows_at_once=at_once)
    run = _chained(attend)
    return Contender("gather-dense", lambda: _run_all(partial(run, inputs.query), inputs.pools))


def _bundled(case: Case, inputs: CaseInputs) -> Contender:
    """JAX's own kernel for GPUs, over pools in its layout."""
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

    run = _chained(attend)
    return Contender("jax-paged-attention", lambda: run(query, pages))


def _torch(case: Case, inputs: CaseInputs) -> Contender:
    """torch's own choice of attention, over K/V that lie side by side already."""
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
        """[S, tokens, heads, D] -> [S, heads, tokens, D]"""
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


# In this order; ours first. Each raises `NotApplicable`, or whatever a peer raises.
CONTENDERS: dict[str, Callable[[Case, CaseInputs], Contender]] = {
    "triton": _triton,
    "xla": _xla,
    "gather-dense": _gather_dense,
    "jax-paged-attention": _bundled,
    "torch-sdpa": _torch,
}


def as_numpy(answer: Any, case: Case) -> Float[np.ndarray, "T H D"]:
    """An answer of any contender in float32."""
    if not isinstance(answer, jax.Array):
        answer = answer.transpose(1, 2).float().cpu().numpy()
        return answer.reshape(case.num_tokens, case.shape.num_heads, case.shape.head_dim)
    return np.asarray(answer.astype(jnp.float32))
