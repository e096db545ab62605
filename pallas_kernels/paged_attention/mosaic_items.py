"""Which queries a TPU kernel computes in which step of its grid."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WorkItems:
    """Item i is the tokens of one row that lie in one query tile, the i-th step of the grid.

    rows: of the batch. tiles: of the queries, in ascending order.
    tokens: first token of the item, counted from the start of its tile. counts: how many.
    ends: context up to and including the item's last token; 0 if there is nothing to do.
    """

    rows: Int[Array, "Q"]
    tiles: Int[Array, "Q"]
    tokens: Int[Array, "Q"]
    counts: Int[Array, "Q"]
    ends: Int[Array, "Q"]


def decode_items(decode_lens: Int[Array, "S"], *, num_tokens: int) -> WorkItems:
    """List the decodes: row s is token s, which is a tile by itself."""
    num_items = min(num_tokens, decode_lens.shape[0])
    numbers = jnp.arange(num_items, dtype=jnp.int32)
    zeros = jnp.zeros_like(numbers)
    return WorkItems(numbers, numbers, zeros, zeros + 1, decode_lens[:num_items])


def prefill_items(
    query_starts: Int[Array, "S1"],
    context_lens: Int[Array, "S"],
    num_decodes: Int[Array, ""],
    *,
    num_tokens: int,
    tile_tokens: int,
) -> WorkItems:
    """List the prefills. A tile of neighbouring tokens with tokens of n rows is n items."""
    num_rows = context_lens.shape[0]
    starts, ends = query_starts[:-1], query_starts[1:]
    is_prefill = (jnp.arange(num_rows, dtype=jnp.int32) >= num_decodes) & (ends > starts)
    first_tiles = starts // tile_tokens
    row_items = jnp.where(is_prefill, (ends - 1) // tile_tokens - first_tiles + 1, 0)
    last_items = jnp.cumsum(row_items)

    items = jnp.arange(max_prefill_items(num_tokens, num_rows, tile_tokens), dtype=jnp.int32)
    is_used = items < last_items[-1]
    # Items that are not used are in the last tile that is, so that nothing is moved for them.
    items = jnp.minimum(items, jnp.maximum(last_items[-1] - 1, 0))
    rows = (last_items[None, :] <= items[:, None]).sum(axis=1, dtype=jnp.int32)
    rows = jnp.minimum(rows, num_rows - 1)
    tiles = first_tiles[rows] + items - (last_items - row_items)[rows]
    # In:  a row of tokens 7..11, context 20; a tile has 4 tokens.
    # Out: token 3 of tile 1, up to context 16, and tokens 0..3 of tile 2, up to context 20.
    firsts = jnp.maximum(starts[rows], tiles * tile_tokens)
    lasts = jnp.minimum(ends[rows], (tiles + 1) * tile_tokens)
    contexts = context_lens[rows] - (ends[rows] - lasts)
    return WorkItems(
        rows, tiles, firsts - tiles * tile_tokens, lasts - firsts, jnp.where(is_used, contexts, 0)
    )


def max_prefill_items(num_tokens: int, num_rows: int, tile_tokens: int) -> int:
    """Largest number of items: every row after the first may cut a tile in two."""
    return -(-num_tokens // tile_tokens) + min(num_rows, num_tokens) - 1
