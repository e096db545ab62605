"""Llama: RoPE, grouped-query attention, gated MLP (Touvron et al. 2023; HF `LlamaForCausalLM`).

With sliding windows it is Mistral (Jiang et al. 2023; HF `MistralForCausalLM`), and with windows in
some of the layers Ministral (HF `MinistralForCausalLM`).

Reads top to bottom: attention, MLP, layer, model, weight table.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.models.config import ModelConfig
from jpaged.models.layers import Linear, apply_rope, rms_norm, rope_angles
from jpaged.models.weight_spec import Part, WeightSpec, single
from pallas_kernels.paged_attention import NO_WINDOW, PagedAttention


class Attention(nnx.Module):
    """Grouped-query attention over the paged KV cache.

    qkv: one projection [E, K, G + 2, D]: the G query heads of a KV head, its key, its value. So
        whatever belongs to a KV head is in one piece.
    kv_scales: what K/V are divided by before they are stored, in the form of
        `PagedAttention.write`; None stores them unchanged.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.group = config.num_heads // config.num_kv_heads
        use_bias, width = config.attention_bias, config.num_heads * config.head_dim
        heads = (config.num_kv_heads, self.group + 2, config.head_dim)
        self.qkv = Linear(config.hidden_size, heads, dtype, use_bias)
        self.out = Linear(width, (config.hidden_size,), dtype, use_bias)
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
        num_tokens, group = x.shape[0], self.group
        heads = self.qkv(x)
        rotated = apply_rope(heads[:, :, : group + 1], angles)
        query = rotated[:, :, :group].reshape(num_tokens, self.num_heads, self.head_dim)
        key, value = rotated[:, :, group], heads[:, :, group + 1]
        kv_scales = None if self.kv_scales is None else self.kv_scales[...]
        layer_inputs = (query, key, value, pool, slots, plan)
        options = {"scale": self.head_dim**-0.5, "window": window, "kv_scales": kv_scales}
        out, pool = attention.write_and_attend(*layer_inputs, **options)
        return self.out(out.reshape(num_tokens, -1)), pool


class MLP(nnx.Module):
    """Gated MLP. gate_up: one projection [E, 2, F] to the gate's features and the up projection's,
    so that a part of the features is a part of both."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        use_bias = config.mlp_bias
        features = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, (2, features), dtype, use_bias)
        self.down = Linear(features, (config.hidden_size,), dtype, use_bias)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        gate_up = self.gate_up(x)
        return self.down(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1])


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
        vocabulary = (config.vocab_size + config.vocab_padding, config.hidden_size)
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
        """Logits of the whole vocabulary; minus infinity behind it, where it is filled up."""
        head = self.embedding if self.config.tie_word_embeddings else self.lm_head
        normed = rms_norm(x, self.norm[...], self.config.rms_norm_eps)
        logits = jnp.einsum("se,ve->sv", normed, head[...], preferred_element_type=jnp.float32)
        if not self.config.vocab_padding:
            return logits
        is_token = jnp.arange(logits.shape[1], dtype=jnp.int32) < self.config.vocab_size
        return jnp.where(is_token[None], logits, -jnp.inf)

    @staticmethod
    def weight_table(config: ModelConfig) -> list[WeightSpec]:
        vocabulary, axes = config.vocab_size, ("vocab", "embed")
        table = [
            single("embedding", "model.embed_tokens.weight", vocabulary, axes),
            single("norm", "model.norm.weight", config.hidden_size, ("embed",)),
        ]
        if not config.tie_word_embeddings:
            table.append(single("lm_head", "lm_head.weight", vocabulary, axes))
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
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    table = [
        single(f"{ours}.{path}", f"{theirs}.{name}.weight", config.hidden_size, ("embed",))
        for path, name in norms.items()
    ]
    for path, axes, parts, join in _projections(config):
        kinds = ["kernel", "bias"]
        if not (config.attention_bias if path.startswith("attention") else config.mlp_bias):
            kinds.remove("bias")
        for kind in kinds:
            stored = "weight" if kind == "kernel" else kind
            table.append(
                WeightSpec(
                    path=f"{ours}.{path}.{kind}",
                    axes=axes if kind == "kernel" else axes[1:],
                    parts=tuple(
                        replace(part, tensor=f"{theirs}.{part.tensor}.{stored}") for part in parts
                    ),
                    join=join,
                    transpose=kind == "kernel",
                )
            )
    return table


_Projection = tuple[str, tuple[str | None, ...], tuple[Part, ...], int]


def _projections(config: ModelConfig) -> list[_Projection]:
    """Of each projection of a layer: its path, the axes of its kernel, what its outputs are made
    from, and along which of their axes."""
    num_kv_heads, head_dim, copies = config.num_kv_heads, config.head_dim, config.kv_head_copies
    queries = (num_kv_heads, config.num_heads // num_kv_heads, head_dim)
    one_head = (num_kv_heads, 1, head_dim)
    features, width = (1, config.intermediate_size), (config.hidden_size,)
    qkv = (
        Part("self_attn.q_proj", queries),
        Part("self_attn.k_proj", one_head, copies),
        Part("self_attn.v_proj", one_head, copies),
    )
    gate_up = (Part("mlp.gate_proj", features), Part("mlp.up_proj", features))
    return [
        ("attention.qkv", ("embed", "kv_heads", None, None), qkv, 1),
        ("attention.out", ("heads", "embed"), (Part("self_attn.o_proj", width),), 0),
        ("mlp.gate_up", ("embed", None, "mlp"), gate_up, 0),
        ("mlp.down", ("mlp", "embed"), (Part("mlp.down_proj", width),), 0),
    ]
