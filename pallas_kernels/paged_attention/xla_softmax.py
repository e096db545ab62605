"""Online softmax over tiles of context tokens, in float32 (Milakov & Gimelshein 2018)."""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.api import MASKED


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PartialSoftmax:
    """A softmax-weighted sum over the tiles seen so far, not yet divided by its denominator."""

    maximum: Float[Array, "*R"]
    denominator: Float[Array, "*R"]
    total: Float[Array, "*R D"]

    @classmethod
    def empty(cls, rows: tuple[int, ...], head_dim: int) -> Self:
        return cls(
            maximum=jnp.full(rows, MASKED, jnp.float32),
            denominator=jnp.zeros(rows, jnp.float32),
            total=jnp.zeros((*rows, head_dim), jnp.float32),
        )

    def merge(self, tile: Self) -> Self:
        maximum = jnp.maximum(self.maximum, tile.maximum)
        old, new = jnp.exp(self.maximum - maximum), jnp.exp(tile.maximum - maximum)
        return type(self)(
            maximum=maximum,
            denominator=self.denominator * old + tile.denominator * new,
            total=self.total * old[..., None] + tile.total * new[..., None],
        )

    def merge_rows(self, tiles: Self, rows: Int[Array, "P"]) -> Self:
        """Merge tile p into row rows[p]; several tiles may belong to one row."""
        maximum = self.maximum.at[rows].max(tiles.maximum)
        old, new = jnp.exp(self.maximum - maximum), jnp.exp(tiles.maximum - maximum[rows])
        # A matmul with a 0/1 matrix adds the tiles up; XLA's scatter-add on CPUs is a scalar loop.
        member = (rows[None, :] == jnp.arange(self.maximum.shape[0])[:, None]).astype(jnp.float32)
        return type(self)(
            maximum=maximum,
            denominator=self.denominator * old
            + jnp.einsum("sp,pkg->skg", member, tiles.denominator * new),
            total=self.total * old[..., None]
            + jnp.einsum("sp,pkgd->skgd", member, tiles.total * new[..., None]),
        )

    def normalised(self, sinks: Float[Array, "..."] | None) -> Float[Array, "*R D"]:
        """Zeros for rows that saw no token. sinks: a score of every row, but for leading axes."""
        if sinks is None:
            return self.total / jnp.maximum(self.denominator, 1e-30)[..., None]
        sinks = jnp.broadcast_to(sinks, self.maximum.shape)
        maximum = jnp.maximum(self.maximum, sinks)
        rescale = jnp.exp(self.maximum - maximum)
        denominator = self.denominator * rescale + jnp.exp(sinks - maximum)
        return self.total * (rescale / denominator)[..., None]


def tile_softmax(
    scores: Float[Array, "*R C"],
    visible: Bool[Array, "... C"],
    weighted_sum: str,
    value: Float[Array, "... C K D"],
) -> PartialSoftmax:
    scores = jnp.where(visible, scores, MASKED)
    maximum = scores.max(-1)
    # Where nothing is visible, MASKED - MASKED would give weights of 1.
    weights = jnp.where(visible, jnp.exp(scores - maximum[..., None]), 0.0)
    total = jnp.einsum(weighted_sum, weights.astype(value.dtype), value)
    return PartialSoftmax(maximum, weights.sum(-1), total.astype(jnp.float32))


def dot(axes: str, query: Float[Array, "..."], key: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.einsum(axes, query, key, preferred_element_type=jnp.float32)
