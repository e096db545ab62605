"""Llama: RoPE, grouped-query attention, gated MLP (Touvron et al. 2023; HF `LlamaForCausalLM`).

With sliding windows it is Mistral (Jiang et al. 2023; HF `MistralForCausalLM`), and with windows in
some of the layers Ministral (HF `MinistralForCausalLM`).

Reads top to bottom: attention, MLP, layer, model, weight table.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.models.config import ModelConfig
from jpaged.models.layers import Linear, apply_rope, rms_norm, rope_angles
from jpaged.models.weights import WeightSpec
from pallas_kernels.paged_attention import NO_WINDOW, PagedAttention


class Attention(nnx.Module):
    """Grouped-query attention over the paged KV cache.

    qkv: one projection to all query heads, then key heads, then value heads.
    kv_scales: what K/V are divided by before they are stored, in the form of
        `PagedAttention.write`; None stores them unchanged.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        num_qkv_heads = config.num_heads + 2 * config.num_kv_heads
        use_bias, width = config.attention_bias, config.num_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, num_qkv_heads * config.head_dim, dtype, use_bias)
        self.out = Linear(width, config.hidden_size, dtype, use_bias)
        self.kv_scales: nnx.Variable | None = nnx.data(None)

    def __call__(
        self,
        x: Float[Array, "T E"],
        pool: Array,
        angles: Float[Array, "2 T D_half"],
        slots: Int[Array, "T"],
        plan: Any,
        *,
        window: Int[Array, ""] | None,
        attention: PagedAttention,
    ) -> tuple[Float[Array, "T E"], Array]:
        num_tokens = x.shape[0]
        heads = self.qkv(x).reshape(num_tokens, -1, self.head_dim)
        first_key, first_value = self.num_heads, self.num_heads + self.num_kv_heads
        rotated = apply_rope(heads[:, :first_value], angles)
        query, key, value = rotated[:, :first_key], rotated[:, first_key:], heads[:, first_value:]
        kv_scales = None if self.kv_scales is None else self.kv_scales[...]
        layer_inputs = (query, key, value, pool, slots, plan)
        options = {"scale": self.head_dim**-0.5, "window": window, "kv_scales": kv_scales}
        out, pool = attention.write_and_attend(*layer_inputs, **options)
        return self.out(out.reshape(num_tokens, -1)), pool


class MLP(nnx.Module):
    """Gated MLP. gate_up: one projection to the gate's features, then the up projection's."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        use_bias = config.mlp_bias
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, dtype, use_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, dtype, use_bias)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Layer(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.rms_norm_eps = config.rms_norm_eps
        self.attention_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        self.attention = Attention(config, dtype)
        self.mlp_norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        self.mlp = MLP(config, dtype)

    def __call__(
        self,
        x: Float[Array, "T E"],
        pool: Array,
        angles: Float[Array, "2 T D_half"],
        slots: Int[Array, "T"],
        plan: Any,
        *,
        window: Int[Array, ""] | None,
        attention: PagedAttention,
    ) -> tuple[Float[Array, "T E"], Array]:
        normed = rms_norm(x, self.attention_norm[...], self.rms_norm_eps)
        attended, pool = self.attention(
            normed, pool, angles, slots, plan, window=window, attention=attention
        )
        x = x + attended
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.rms_norm_eps)), pool


class Llama(nnx.Module):
    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.config = config
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding = nnx.Param(jnp.zeros(vocabulary, dtype))
        self.layers = nnx.List([Layer(config, dtype) for _ in range(config.num_layers)])
        self.norm = nnx.Param(jnp.ones(config.hidden_size, dtype))
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(jnp.zeros(vocabulary, dtype))

    def __call__(
        self,
        token_ids: Int[Array, "T"],
        positions: Int[Array, "T"],
        slots: Int[Array, "T"],
        pools: tuple[Array, ...],
        plan: Any,
        *,
        attention: PagedAttention,
    ) -> tuple[Float[Array, "T E"], tuple[Array, ...]]:
        """Hidden states behind the last layer, not yet normalised, and the updated pools."""
        x = self.embedding[...][token_ids]
        angles = rope_angles(positions, self.config.rope, self.config.head_dim)
        new_pools = []
        windows = _traced_windows(self.config)
        for layer, pool, window in zip(self.layers, pools, windows, strict=True):
            graph, state = nnx.split(layer)
            layer_inputs = (x, pool, angles, slots, plan)
            x, pool = _run_layer(graph, state, layer_inputs, window=window, attention=attention)
            new_pools.append(pool)
        return x, tuple(new_pools)

    def set_kv_scales(self, kv_scales: Sequence[Float[Array, "K2"]]) -> None:
        """Store K/V divided by these scales, one array a layer, from now on."""
        for layer, scales in zip(self.layers, kv_scales, strict=True):
            layer.attention.kv_scales = nnx.Variable(scales)

    def logits(self, x: Float[Array, "S E"]) -> Float[Array, "S V"]:
        head = self.embedding if self.config.tie_word_embeddings else self.lm_head
        normed = rms_norm(x, self.norm[...], self.config.rms_norm_eps)
        return jnp.einsum("se,ve->sv", normed, head[...], preferred_element_type=jnp.float32)

    @staticmethod
    def weight_table(config: ModelConfig) -> list[WeightSpec]:
        table = [
            WeightSpec(path="embedding", sources=("model.embed_tokens.weight",)),
            WeightSpec(path="norm", sources=("model.norm.weight",)),
        ]
        if not config.tie_word_embeddings:
            table.append(WeightSpec(path="lm_head", sources=("lm_head.weight",)))
        for index in range(config.num_layers):
            table.extend(_layer_weights(config, index))
        return table


@partial(jax.jit, static_argnames=("graph", "attention"))
def _run_layer(graph, state, layer_inputs, *, window, attention):
    """Run one layer; jitted, so that layers of equal shape are traced and lowered only once."""
    return nnx.merge(graph, state)(*layer_inputs, window=window, attention=attention)


def _traced_windows(config: ModelConfig) -> list[Int[Array, ""] | None]:
    """Make the window of each layer an array, so that it is an input of the layer's program.

    None for every layer in a model without windows, whose program has no such input.
    """
    if all(window is None for window in config.windows):
        return [None] * config.num_layers
    return [jnp.int32(NO_WINDOW if window is None else window) for window in config.windows]


def _layer_weights(config: ModelConfig, index: int) -> list[WeightSpec]:
    ours, theirs = f"layers.{index}", f"model.layers.{index}"
    projections = {
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.out": ("self_attn.o_proj",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    }
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    table = [
        WeightSpec(path=f"{ours}.{path}", sources=(f"{theirs}.{name}.weight",))
        for path, name in norms.items()
    ]
    for path, names in projections.items():
        kernel = tuple(f"{theirs}.{name}.weight" for name in names)
        table.append(WeightSpec(path=f"{ours}.{path}.kernel", sources=kernel, transpose=True))
        if config.attention_bias if path.startswith("attention") else config.mlp_bias:
            bias = tuple(f"{theirs}.{name}.bias" for name in names)
            table.append(WeightSpec(path=f"{ours}.{path}.bias", sources=bias))
    return table
