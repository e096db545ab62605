"""Building blocks that architectures share."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.models.rope import RopeConfig, attention_factor, inverse_frequencies


class Linear(nnx.Module):
    """x @ kernel + bias, the kernel stored [in, *out]: the output may have several axes."""

    def __init__(
        self, num_inputs: int, outputs: tuple[int, ...], dtype: jnp.dtype, use_bias: bool = False
    ) -> None:
        self.kernel = nnx.Param(jnp.zeros((num_inputs, *outputs), dtype))
        self.use_bias = use_bias
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(outputs, dtype))

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T ..."]:
        out = jnp.tensordot(x, self.kernel[...], axes=1)
        return out + self.bias[...][None] if self.use_bias else out


def rms_norm(x: Float[Array, "T E"], weight: Float[Array, "E"], eps: float) -> Float[Array, "T E"]:
    """x / rms(x) * weight, computed in float32 (Zhang & Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight[None, :]


def rope_angles(
    positions: Int[Array, "T"], rope: RopeConfig, head_dim: int
) -> Float[Array, "2 T D_half"]:
    """Cosines and sines of every position, times the attention factor of the scaling."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)]) * attention_factor(rope)


def apply_rope(
    heads: Float[Array, "T K J D"], angles: Float[Array, "2 T D_half"]
) -> Float[Array, "T K J D"]:
    """Rotate dimension d together with dimension d + D/2 (the order of HF checkpoints).

    heads: J of each KV head.
    """
    cos, sin = angles[:, :, None, None, :]
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(heads.dtype)
