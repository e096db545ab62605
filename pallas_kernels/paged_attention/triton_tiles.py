"""What the Triton kernels share: tiles of paged K/V, and softmax over them.

A tile is TILE neighbouring tokens of a sequence, whatever the block size: its tokens are gathered
one by one through the block table. Nothing is read outside of a sequence and its window.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.api import MASKED
from pallas_kernels.paged_attention.sizes import power_of_two_from
from pallas_kernels.triton_lowering import dot, load

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, kw_only=True)
class KernelShape:
    """Everything static that an attention kernel depends on.

    tile: K/V tokens a tile. rows: query rows of a program, a power of two.
    num_warps: of a program. num_stages: tiles on their way at once.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    tile: int
    rows: int
    num_warps: int
    num_stages: int
    scale: float
    softcap: float | None
    has_window: bool
    has_sinks: bool
    has_kv_scales: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def width(self) -> int:
        return padded_head_dim(self.head_dim)


def padded_head_dim(head_dim: int) -> int:
    """Fill up a head dimension: Triton takes powers of two only, tensor cores at least 16."""
    return max(16, power_of_two_from(head_dim))


@dataclass(frozen=True)
class PagedSequence:
    """K/V of one KV head of one sequence, of which the tokens [first, length) may be read.

    scales: what stored keys and values are to be multiplied by, None for 1.
    """

    pool_ref: Any  # [N, B, 2K, D]
    tables_ref: Any  # [S, M] int32
    row: Array
    kv_head: Array
    first: Array
    length: Array
    scales: tuple[Array, Array] | None
    shape: KernelShape

    def read_tile(
        self, tile: Int[Array, ""], dtype: jnp.dtype
    ) -> tuple[Float[Array, "C D"], Float[Array, "C D"], Int[Array, "C"]]:
        """Keys, values and positions of the tile's tokens, not yet multiplied by their scales;
        zeros where the sequence has none."""
        shape = self.shape
        positions = tile * shape.tile + jnp.arange(shape.tile, dtype=jnp.int32)
        is_inside = (positions >= self.first) & (positions < self.length)
        # Block sizes are powers of two.
        columns = positions >> (shape.block_size.bit_length() - 1)
        blocks = load(self.tables_ref.at[self.row, columns], mask=is_inside, other=0)
        slots = positions & (shape.block_size - 1)
        dims = jnp.arange(shape.width, dtype=jnp.int32)
        mask = is_inside[:, None] & (dims < shape.head_dim)[None, :]
        zero = jnp.zeros((), self.pool_ref.dtype)
        key, value = (
            load(
                self.pool_ref.at[blocks[:, None], slots[:, None], head, dims[None, :]],
                mask=mask,
                other=zero,
            )
            for head in (2 * self.kv_head, 2 * self.kv_head + 1)
        )
        return key.astype(dtype), value.astype(dtype), positions


@dataclass(frozen=True)
class SoftmaxSum:
    """A softmax-weighted sum of values, not yet divided. Exponents are powers of two."""

    maximum: Float[Array, "R"]
    denominator: Float[Array, "R"]
    total: Float[Array, "R D"]

    def normalised(self, sinks: Float[Array, "R"] | None) -> Float[Array, "R D"]:
        """Zeros for rows that saw no token."""
        maximum, denominator, total = self.maximum, self.denominator, self.total
        if sinks is not None:
            maximum = jnp.maximum(maximum, sinks * LOG2_E)
            rescale = jnp.exp2(self.maximum - maximum)
            denominator = denominator * rescale + jnp.exp2(sinks * LOG2_E - maximum)
            total = total * rescale[:, None]
        return total / jnp.maximum(denominator, 1e-30)[:, None]


def softmax_over_tiles(
    query: Float[Array, "R D"],
    sequence: PagedSequence,
    first_tile: Int[Array, ""],
    end_tile: Int[Array, ""],
    is_visible: Callable[[Int[Array, "C"]], Bool[Array, "#R C"]],
) -> SoftmaxSum:
    """Online softmax (Milakov & Gimelshein 2018; Dao et al. 2022, algorithm 1) in float32.

    Where a row sees nothing of its first tiles it sums up values of no meaning, which the first
    token that it sees scales to zero.
    """
    shape = sequence.shape
    key_scale, value_scale = sequence.scales or (None, None)

    def step(tile: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        old_maximum, denominator, total = carry
        key, value, positions = sequence.read_tile(tile, query.dtype)
        scores = scaled_scores(query, key, shape, key_scale)
        scores = jnp.where(is_visible(positions), scores, MASKED)
        maximum = jnp.maximum(old_maximum, scores.max(axis=1))
        rescale = jnp.exp2(old_maximum - maximum)
        weights = jnp.exp2(scores - maximum[:, None])
        weighted = matmul(weights.astype(value.dtype), value)
        return (
            maximum,
            denominator * rescale + weights.sum(axis=1),
            total * rescale[:, None] + weighted,
        )

    num_rows, width = query.shape
    start = (
        jnp.full(num_rows, MASKED, jnp.float32),
        jnp.zeros(num_rows, jnp.float32),
        jnp.zeros((num_rows, width), jnp.float32),
    )
    maximum, denominator, total = lax.fori_loop(first_tile, end_tile, step, start)
    if value_scale is not None:
        total = total * value_scale
    return SoftmaxSum(maximum, denominator, total)


def scaled_scores(
    query: Float[Array, "R D"],
    key: Float[Array, "C D"],
    shape: KernelShape,
    key_scale: Array | None,
) -> Float[Array, "R C"]:
    """Scores as exponents of two."""
    scores = matmul(query, key.T)
    if key_scale is not None:
        scores = scores * key_scale
    if shape.softcap is None:
        return scores * (shape.scale * LOG2_E)
    return jnp.tanh(scores * (shape.scale / shape.softcap)) * (shape.softcap * LOG2_E)


def matmul(left: Float[Array, "I J"], right: Float[Array, "J O"]) -> Float[Array, "I O"]:
    """Multiply in tensor cores; float32 without their rounding to 10 bits."""
    is_wide = left.dtype == jnp.float32
    return dot(left, right, precision=lax.Precision.HIGHEST if is_wide else None)


def ceil_div(value: Array, divisor: Array | int) -> Array:
    return lax.div(value + (divisor - 1), jnp.int32(divisor))


def first_visible(position: Array, window: Array | None) -> Array:
    """The first position that a token at `position` sees."""
    if window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - window + 1, 0)


class OptionRefs(NamedTuple):
    """Inputs that a kernel may have or not: window [1], sinks [H], kv_scales [2K]."""

    window: Any | None
    sinks: Any | None
    kv_scales: Any | None

    def read_window(self) -> Array | None:
        return None if self.window is None else self.window[0]

    def read_sinks(self, heads: Array, is_head: Array) -> Array | None:
        if self.sinks is None:
            return None
        return load(self.sinks.at[heads], mask=is_head, other=0).astype(jnp.float32)

    def read_kv_scales(self, kv_head: Array) -> tuple[Array, Array] | None:
        if self.kv_scales is None:
            return None
        return self.kv_scales[2 * kv_head], self.kv_scales[2 * kv_head + 1]


def split_options(refs: Sequence[Any], shape: KernelShape) -> tuple[OptionRefs, list[Any]]:
    """Split `refs` into the options and the references that follow them."""
    rest = list(refs)
    flags = shape.has_window, shape.has_sinks, shape.has_kv_scales
    return OptionRefs(*[rest.pop(0) if flag else None for flag in flags]), rest


def dot_dtype(query: Any, pool: Any) -> jnp.dtype:
    """Type that products are computed in: types of one byte only store K/V."""
    return query.dtype if pool.dtype.itemsize == 1 else pool.dtype
