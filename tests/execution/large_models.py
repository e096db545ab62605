"""Steps of models too large to hold, as abstract arrays split over the chips of a mesh.

Every chip runs the model with its share of the heads, of the MLP's columns and of the vocabulary.
What the chips have is added up after the embedding and after each attention and MLP.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jpaged.execution.kv_cache import kv_cache_spec
from jpaged.execution.programs import ProgramSpec, forward_program
from jpaged.execution.slot_state import SlotState
from jpaged.models.config import ModelConfig
from jpaged.models.layers import Linear
from jpaged.models.llama import Llama
from jpaged.models.loading import Model
from jpaged.models.sharding import TENSOR_AXIS, partition_spec
from jpaged.target import Target
from pallas_kernels.paged_attention import PagedAttention
from tests.kernels.gpu_compiler import on

LLAMA_3_8B = ModelConfig.from_hf(
    {
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
)
LLAMA_3_70B = replace(
    LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)
DONATED = (1, 2)  # arguments of a step: the pools and the state by slot


class SummedLinear(nnx.Module):
    """A chip has the rows of the kernel that its columns of the matmul before it need."""

    def __init__(self, share: Linear) -> None:
        self.share = share

    def __call__(self, x: jax.Array) -> jax.Array:
        return lax.psum(self.share(x), "tp")


class SplitEmbedding(nnx.Module):
    """Stands for the array [V, E], of which a chip has the rows of its part of the vocabulary."""

    def __init__(self, share: nnx.Param) -> None:
        self.share = share

    def __getitem__(self, index: Any) -> Any:
        if index is Ellipsis:
            return self
        share = self.share[...]
        rows = index - lax.axis_index("tp") * share.shape[0]
        is_mine = (rows >= 0) & (rows < share.shape[0])
        return lax.psum(jnp.where(is_mine[:, None], share[rows], 0), "tp")


def chip_model(config: ModelConfig, num_chips: int) -> tuple[Model, list[Any], list[int | None]]:
    """One chip's part of the model, its parameters, and the axis along which each was split."""
    config = replace(
        config,
        vocab_size=config.vocab_size // num_chips,
        intermediate_size=config.intermediate_size // num_chips,
        num_heads=config.num_heads // num_chips,
        # With fewer of them than chips, several chips have the same.
        num_kv_heads=max(config.num_kv_heads // num_chips, 1),
    )
    dtype = jnp.dtype("bfloat16")

    def build() -> Llama:
        model = Llama(config, dtype)
        model.embedding = SplitEmbedding(model.embedding)
        for layer in model.layers:
            layer.attention.out = SummedLinear(layer.attention.out)
            layer.mlp.down = SummedLinear(layer.mlp.down)
        return model

    graph, state = nnx.split(nnx.eval_shape(build))
    params, treedef = jax.tree.flatten(state)
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    specs = {spec.path: partition_spec(spec.axes) for spec in Llama.weight_table(config)}
    # What stands for a parameter here has it as its `share`.
    axes = [_split_axis(specs[path.replace(".share", "")]) for path in paths]
    return Model(config, dtype, graph, treedef, ()), params, axes


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of `batch` rows, with room for `context` tokens each; of decodes if `num_tokens` is
    `batch`.

    attention: that of one chip. pool_axis: of the KV heads in its pools.
    """

    config: ModelConfig
    attention: PagedAttention
    pool_axis: int
    batch: int
    context: int
    num_tokens: int

    def on(self, mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The program and its abstract arguments, of which `DONATED` are to be donated."""
        model, params, axes = chip_model(self.config, mesh.size)
        spec = self._program_spec(model, mesh)
        shape = spec.forward_shape(self.num_tokens, decode_only=self.num_tokens == self.batch)
        pool_spec = _split_along(self.pool_axis)
        program = jax.shard_map(
            forward_program(spec, shape),
            mesh=mesh,
            in_specs=(tuple(map(_split_along, axes)), pool_spec, P(), P()),
            out_specs=(P(), pool_spec, P()),
            check_vma=False,
        )
        arguments = (
            tuple(_join(mesh, *param) for param in zip(params, axes, strict=True)),
            tuple(_join(mesh, pool, self.pool_axis) for pool in spec.kv_cache.abstract()),
            SlotState(*(on(mesh, each.shape, each.dtype) for each in spec.slot_shape.abstract())),
            on(mesh, (shape.packed_size,), jnp.int32),
        )
        return program, arguments

    def _program_spec(self, model: Model, mesh: Mesh) -> ProgramSpec:
        block_size = self.attention.default_block_size(
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            dtype=model.dtype,
        )
        blocks = -(-self.context // block_size)
        kv_cache = kv_cache_spec(
            model.config,
            self.attention,
            model.dtype,
            num_blocks=self.batch * blocks,
            block_size=block_size,
        )
        chip = mesh.devices.flat[0]
        return ProgramSpec(
            target=Target(platform=chip.platform, device_kind=chip.device_kind),
            model=model,
            attention=self.attention,
            kv_cache=kv_cache,
            num_slots=self.batch,
            max_num_tokens=self.num_tokens,
            num_table_blocks=blocks,
            seed=0,
        )


def num_donated(compiled: Compiled) -> int:
    """Number of arrays that a program gives back in the memory that it got them in."""
    header, _, _ = (compiled.as_text() or "").partition("\n")
    return len(re.findall(r"\{[\d, ]*\}: \(\d+, \{[\d, ]*\}, (?:may|must)-alias\)", header))


def check_collectives(compiled: Compiled, config: ModelConfig) -> None:
    """Chips wait for each other after the embedding, and twice a layer."""
    names = r" (all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-\w+)"
    found = Counter(re.findall(rf"{names}(?:-start)?\(", compiled.as_text() or ""))
    assert set(found) == {"all-reduce"} and found["all-reduce"] <= 2 * config.num_layers + 1, found


def _split_axis(spec: P) -> int | None:
    return spec.index(TENSOR_AXIS) if TENSOR_AXIS in spec else None


def _split_along(axis: int | None) -> P:
    return P() if axis is None else P(*[None] * axis, "tp")


def _join(mesh: Mesh, part: Any, axis: int | None) -> jax.ShapeDtypeStruct:
    """The array of which every chip has such a part, or all of it."""
    sizes = [size * mesh.size if i == axis else size for i, size in enumerate(part.shape)]
    return on(mesh, sizes, part.dtype, *_split_along(axis))
