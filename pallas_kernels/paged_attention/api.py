"""The contract of paged attention: what a step tells it, and what every backend offers."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SINK_BLOCK = 0  # rows that only pad a batch write their K/V here; nobody reads it
NO_WINDOW = 1 << 30
MASKED = -1e30  # a score of no weight; finite, so that rows without any token stay finite


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """One ragged batch: S rows with 1..n query tokens each, flattened to T tokens.

    The first `num_decodes` rows have one token each, which is token `row` of the batch; the rows
    after them are prefill chunks, whose tokens follow in the order of their rows.

    block_tables: row s holds the ids of the blocks of sequence s, in order; unused entries are 0.
    context_lens: tokens of sequence s up to and including its last token of this step; 0 pads.
    query_starts: row s has the tokens [query_starts[s], query_starts[s + 1]).
    """

    block_tables: Int[Array, "S M"]
    context_lens: Int[Array, "S"]
    query_starts: Int[Array, "S1"]
    num_decodes: Int[Array, ""]


class PagedAttention(Protocol):
    """A backend of paged attention.

    `plan` derives, once a step, what all layers share; `write_and_attend` runs in every layer.
    Everything is traced: methods are called inside jit.
    """

    @property
    def name(self) -> str: ...

    @property
    def heads_axis(self) -> int:
        """Axis of a pool along which what belongs to a KV head is in one piece, head by head."""
        ...

    def default_block_size(self, *, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> int:
        """Tokens of a block when no option sets them."""
        ...

    def pool_shape(
        self, *, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Shape of one layer's pool."""
        ...

    def largest_pool(self, *, num_blocks: int, block_shape: tuple[int, ...], itemsize: int) -> int:
        """Largest number of blocks, up to `num_blocks`, of a pool with `itemsize` bytes a number.

        block_shape: the shape of the pool without its first axis.
        """
        ...

    def supports(
        self,
        *,
        block_size: int,
        dtype: jnp.dtype,
        platform: str,
        compute_capability: tuple[int, int] | None,
    ) -> str | None:
        """Why this backend cannot serve a pool of `dtype`, or None if it can.

        platform: JAX's name of the kind of device, e.g. tpu.
        compute_capability: of an NVIDIA card; None on anything else.
        """
        ...

    def plan(
        self, metadata: AttentionMetadata, *, num_tokens: int, block_size: int, decode_only: bool
    ) -> Any:
        """Make the pytree that `attend` takes for `num_tokens` tokens, T.

        `decode_only` promises that every row is a decode or padding.
        """
        ...

    def write(
        self,
        pool: Array,
        key: Float[Array, "T K D"],
        value: Float[Array, "T K D"],
        slots: Int[Array, "T"],
        *,
        kv_scales: Float[Array, "K2"] | None = None,
    ) -> Array:
        """Put K/V of token t into slot `slots[t]` (block * block size + offset), in place when
        the pool is donated.

        kv_scales: K/V are divided by these before they are stored, one for the keys and one for
        the values of each KV head, interleaved. For pools of one byte a number, which hold what
        is nearest in their range.
        """
        ...

    def copy_blocks(self, pool: Array, sources: Int[Array, "P"], targets: Int[Array, "P"]) -> Array:
        """Copy blocks of one layer, all at the same time: no copy sees what another one writes.

        A target past the end of the pool is no copy at all.
        """
        ...

    def gather_blocks(self, pool: Array, blocks: Int[Array, "P"]) -> Array:
        """Return copies of blocks of one layer, in order: [P, ...]."""
        ...

    def scatter_blocks(self, pool: Array, blocks: Int[Array, "P"], values: Array) -> Array:
        """Put back what `gather_blocks` returned, in place when the pool is donated; into
        different blocks, if need be. A block past the end of the pool is left out."""
        ...

    def attend(
        self,
        query: Float[Array, "T H D"],
        pool: Array,
        plan: Any,
        *,
        scale: float,
        window: int | Int[Array, ""] | None = None,
        softcap: float | None = None,
        sinks: Float[Array, "H"] | None = None,
        kv_scales: Float[Array, "K2"] | None = None,
    ) -> Float[Array, "T H D"]:
        """Causal attention of every token over its own sequence; rows of padding are finite.

        window: most tokens that a token sees, itself included. As an array it lets one program
        serve layers of any window; NO_WINDOW is wider than any context.
        softcap: scores x become softcap * tanh(x / softcap), after the scale.
        sinks: a score of each head that takes part in the softmax and has no value.
        kv_scales: the scales that the pool was written with.
        """
        ...

    def write_and_attend(
        self,
        query: Float[Array, "T H D"],
        key: Float[Array, "T K D"],
        value: Float[Array, "T K D"],
        pool: Array,
        slots: Int[Array, "T"],
        plan: Any,
        *,
        kv_scales: Float[Array, "K2"] | None = None,
        **options: Any,
    ) -> tuple[Float[Array, "T H D"], Array]:
        """`write`, then `attend` with these options. Returns the answers and the pool.

        A backend may do both at once, and need not write what belongs to padding.
        """
        ...


def kv_slots(
    block_tables: Int[Array, "S M"],
    rows: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    block_size: int,
) -> Int[Array, "T"]:
    """The slot of each token. Tokens of row S (padding) get slots of the sink block."""
    num_rows = block_tables.shape[0]
    blocks = block_tables.at[rows, positions // block_size].get(mode="fill", fill_value=SINK_BLOCK)
    blocks = jnp.where(rows < num_rows, blocks, SINK_BLOCK)
    return blocks * block_size + positions % block_size
