"""Whole steps of a large model, compiled for cards that are not there."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jpaged.kv_cache import kv_cache_spec
from jpaged.models.config import ModelConfig
from jpaged.models.llama import Llama
from jpaged.models.loading import Model
from jpaged.programs import ProgramSpec, forward_program
from pallas_kernels.paged_attention import PagedAttention, TritonPagedAttention
from pallas_kernels.paged_attention.interleaved_pool import InterleavedPool
from tests.kernels.gpu_compiler import (
    GpuProgram,
    compile_lowered,
    lower_for,
    mesh_of,
    needs_cuda_plugin,
    on,
)

pytestmark = [needs_cuda_plugin, pytest.mark.slow]

LLAMA_3_8B = {
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
BATCH, BLOCK_SIZE = 64, 16


def abstract_model() -> tuple[Model, list[tuple[str, jax.ShapeDtypeStruct]]]:
    """A model without parameters, and the path of each parameter and what it would be."""
    config = ModelConfig.from_hf(LLAMA_3_8B)
    dtype = jnp.dtype("bfloat16")
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype)))
    params, treedef = jax.tree.flatten(state)
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    return Model(config, dtype, graph, treedef, ()), list(zip(paths, params, strict=True))


def program_spec(context: int, attention: PagedAttention) -> ProgramSpec:
    """Room for a batch of such contexts."""
    (model, _), blocks = abstract_model(), -(-context // BLOCK_SIZE)
    kv_cache = kv_cache_spec(
        model.config, attention, model.dtype, num_blocks=BATCH * blocks, block_size=BLOCK_SIZE
    )
    return ProgramSpec(
        model=model,
        attention=attention,
        kv_cache=kv_cache,
        num_slots=BATCH,
        max_num_tokens=2048,
        num_table_blocks=blocks,
        seed=0,
    )


@dataclass(frozen=True)
class SplitAttention:
    """Attention whose heads are split over the cards of a mesh, each with its own KV heads."""

    inner: TritonPagedAttention
    name: str = "split"
    write_and_attend = InterleavedPool.write_and_attend

    def pool_shape(self, **sizes):
        return self.inner.pool_shape(**sizes)

    def plan(self, metadata, **options):
        return self.inner.plan(metadata, **options)

    def write(self, pool, key, value, slots, *, kv_scales=None):
        assert kv_scales is None
        specs = (POOL, HEADS, HEADS, P())
        write = jax.shard_map(self.inner.write, in_specs=specs, out_specs=POOL, check_vma=False)
        return write(pool, key, value, slots)

    def attend(self, query, pool, plan, *, scale, window=None, kv_scales=None):
        assert window is None and kv_scales is None
        attend = jax.shard_map(
            partial(self.inner.attend, scale=scale),
            in_specs=(HEADS, POOL, P()),
            out_specs=HEADS,
            check_vma=False,
        )
        return attend(query, pool, plan)


HEADS, POOL = P(None, "tp", None), P(None, None, "tp", None)
# Columns of the first matmul of each pair, rows of the second one.
SPLIT_WEIGHTS = {"qkv": (None, "tp"), "gate_up": (None, "tp"), "out": ("tp",), "down": ("tp",)}


def compile_step(num_cards: int, context: int, num_tokens: int, folder: Path) -> GpuProgram:
    attention = TritonPagedAttention(group=4, head_dim=128)
    spec = program_spec(context, attention if num_cards == 1 else SplitAttention(attention))
    shape = spec.forward_shape(num_tokens, decode_only=num_tokens == BATCH)
    mesh = mesh_of("A100", num_cards)
    params = []
    for path, param in abstract_model()[1]:
        [axes] = [axes for name, axes in SPLIT_WEIGHTS.items() if name in path] or [()]
        params.append(on(mesh, param.shape, param.dtype, *axes))
    pools = tuple(on(mesh, each.shape, each.dtype, *POOL) for each in spec.kv_cache.abstract())
    lowered = lower_for(
        mesh,
        forward_program(spec, shape),
        tuple(params),
        pools,
        on(mesh, (spec.num_slots,), jnp.int32),
        on(mesh, (shape.packed_size,), jnp.int32),
        donate_argnums=1,
    )
    return compile_lowered(lowered, folder)


@pytest.mark.parametrize("num_tokens", [BATCH, 2048], ids=["decode", "mixed"])
@pytest.mark.parametrize("num_cards,context", [(1, 4096), (2, 8192)])
def test_step_of_a_large_model(num_cards, context, num_tokens, tmp_path):
    """One launch for the host, the pool in place, and little memory beside it."""
    program = compile_step(num_cards, context, num_tokens, tmp_path)
    program.check_is_one_command_buffer()
    num_blocks = BATCH * context // BLOCK_SIZE + 1
    kv_heads = 2 * 8 // num_cards
    program.check_pool_stays_in_place((num_blocks, BLOCK_SIZE, kv_heads, 128), num_pools=32)
    assert program.compiled.memory_analysis().temp_size_in_bytes <= 0.5e9
