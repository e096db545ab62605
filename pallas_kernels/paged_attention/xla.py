"""Paged attention in plain XLA: the path of CPUs, and the oracle of the kernels.

Work is cut into tiles of `TILE` context tokens, and only tiles that hold tokens of a sequence are
computed: both loops below have trip counts that the step's lengths decide, so a short sequence
does not pay for a long neighbour, nor for padding. Softmax is computed online over the tiles
(Milakov & Gimelshein 2018; Dao et al. 2022, FlashAttention, algorithm 1), in float32.
"""

from dataclasses import dataclass, field
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.paged_attention.api import AttentionMetadata
from pallas_kernels.paged_attention.interleaved_pool import InterleavedPool
from pallas_kernels.paged_attention.xla_softmax import PartialSoftmax, dot, tile_softmax

TILE = 64  # context tokens a tile; a multiple of any block size up to it
MIN_DECODE_TILES, MAX_DECODE_TILES = 4, 16  # tiles of decode rows in one batched matmul
QUERY_TILE = 64  # query tokens of a prefill chunk in one matmul


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileList:
    """Tiles of several rows, one row after the other.

    Entry i of the list belongs to the row r with `ends[r - 1] <= i < ends[r]`. It is the tile with
    the number `firsts[r] + i - ends[r - 1]` of that row.
    """

    ends: Int[Array, "S"]
    firsts: Int[Array, "S"]

    @classmethod
    def between(cls, firsts: Int[Array, "S"], ends: Int[Array, "S"]) -> Self:
        """List the tiles [firsts[s], ends[s]) of each row s."""
        return cls(ends=jnp.cumsum(ends - firsts), firsts=firsts)

    @property
    def count(self) -> Int[Array, ""]:
        return self.ends[-1]

    def rows_and_numbers(
        self, tiles: Int[Array, "*P"]
    ) -> tuple[Int[Array, "*P"], Int[Array, "*P"]]:
        """Row of each entry and the number of its tile; past the last entry: row S, tile 0."""
        num_rows = self.ends.shape[0]
        rows = jnp.searchsorted(self.ends, tiles, side="right").astype(jnp.int32)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), self.ends])
        firsts = jnp.append(self.firsts, 0)
        return rows, jnp.where(rows < num_rows, firsts[rows] + tiles - starts[rows], 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class XlaPlan:
    """What all layers of a step share.

    block_tables, context_lens: with one row more than the batch; row S is empty.
    decode_lens: context of each row that is a decode, 0 of the others.
    decode_tiles: all tiles of the decodes' contexts. query_tiles: those of the prefill chunks.
    """

    block_tables: Int[Array, "S1 M"]
    context_lens: Int[Array, "S1"]
    query_starts: Int[Array, "S1"]
    decode_lens: Int[Array, "S"]
    decode_tiles: TileList
    query_tiles: TileList
    decode_only: bool = field(metadata={"static": True})

    def decode_tiles_within(self, window: Int[Array, ""] | int, tile_tokens: int) -> TileList:
        """List the tiles that hold a token which a decode sees through a window."""
        firsts = jnp.maximum(self.decode_lens - window, 0) // tile_tokens
        return TileList.between(firsts, -(-self.decode_lens // tile_tokens))


@dataclass(frozen=True)
class _Options:
    """The options of one call of `attend`; sinks by KV head and group."""

    window: Int[Array, ""] | int | None
    softcap: float | None
    sinks: Float[Array, "K G"] | None
    kv_scales: Float[Array, "K2"] | None

    def finish_scores(self, scores: Float[Array, "... K Q C"]) -> Float[Array, "... K Q C"]:
        if self.kv_scales is not None:
            scores = scores * _along_heads(self.kv_scales[0::2], scores)
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def scale_values(self, out: Float[Array, "... K Q D"]) -> Float[Array, "... K Q D"]:
        return out if self.kv_scales is None else out * _along_heads(self.kv_scales[1::2], out)

    def first_visible(self, query_positions: Int[Array, "..."]) -> Int[Array, "..."]:
        """First position that a query sees, never below 0."""
        if self.window is None:
            return jnp.zeros_like(query_positions)
        return jnp.maximum(query_positions - self.window + 1, 0)


@dataclass(frozen=True)
class XlaPagedAttention(InterleavedPool):
    name: str = "xla"

    def supports(
        self,
        *,
        block_size: int,
        dtype: jnp.dtype,
        platform: str,
        compute_capability: tuple[int, int] | None,
    ) -> str | None:
        is_float8 = dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)
        if is_float8 and compute_capability is None:
            return f"XLA would widen the whole {dtype.name} pool in every layer; int8 is possible"
        return None

    def plan(
        self, metadata: AttentionMetadata, *, num_tokens: int, block_size: int, decode_only: bool
    ) -> XlaPlan:
        num_rows, num_table_blocks = metadata.block_tables.shape
        tile_blocks = max(1, TILE // block_size)
        rows = jnp.arange(num_rows)
        is_decode = rows < metadata.num_decodes
        decode_lens = jnp.where(is_decode, metadata.context_lens, 0)
        context_tiles = -(-decode_lens // (tile_blocks * block_size))
        query_lens = jnp.diff(metadata.query_starts)
        query_tiles = jnp.where(is_decode, 0, -(-query_lens // QUERY_TILE))
        # The last tile may reach past the end of the table: let it read the sink block there.
        padding = ((0, 1), (0, -num_table_blocks % tile_blocks))
        return XlaPlan(
            block_tables=jnp.pad(metadata.block_tables, padding),
            context_lens=jnp.pad(metadata.context_lens, (0, 1)),
            query_starts=metadata.query_starts,
            decode_lens=decode_lens,
            decode_tiles=TileList.between(jnp.zeros_like(context_tiles), context_tiles),
            query_tiles=TileList.between(jnp.zeros_like(query_tiles), query_tiles),
            decode_only=decode_only,
        )

    def attend(
        self,
        query: Float[Array, "T H D"],
        pool: Num[Array, "N B K2 D"],
        plan: XlaPlan,
        *,
        scale: float,
        window: int | Int[Array, ""] | None = None,
        softcap: float | None = None,
        sinks: Float[Array, "H"] | None = None,
        kv_scales: Float[Array, "K2"] | None = None,
    ) -> Float[Array, "T H D"]:
        num_tokens = query.shape[0]
        num_rows = plan.query_starts.shape[0] - 1
        num_kv_heads, head_dim = pool.shape[2] // 2, pool.shape[3]
        # "T K G D": the query heads of one KV head are neighbours.
        grouped = (query * scale).reshape(num_tokens, num_kv_heads, -1, head_dim)
        if sinks is not None:
            sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)
        options = _Options(window, softcap, sinks, kv_scales)
        num_decode_rows = min(num_tokens, num_rows)
        out = _attend_decodes(grouped[:num_decode_rows], pool, plan, options)
        if not plan.decode_only:
            out = _attend_prefills(grouped, pool, plan, options, out)
        return out.reshape(query.shape)


def _attend_decodes(
    query: Float[Array, "R K G D"],
    pool: Num[Array, "N B K2 D"],
    plan: XlaPlan,
    options: _Options,
) -> Float[Array, "R K G D"]:
    """Rows of one token, R = min(S, T). Row r is token r; rows that are no decodes get zeros."""
    num_rows, num_kv_heads, group, head_dim = query.shape
    heads = (num_kv_heads, group)
    # Row R collects the tiles that only fill up the last matmul.
    query = jnp.pad(query, ((0, 1), (0, 0), (0, 0), (0, 0)))
    # About one tile a row: more would only be padding when contexts are short.
    tiles_at_once = min(max(num_rows, MIN_DECODE_TILES), MAX_DECODE_TILES)
    decode_tiles = plan.decode_tiles
    if options.window is not None:
        decode_tiles = plan.decode_tiles_within(options.window, _tile_tokens(pool))

    def step(iteration: Array, carry: PartialSoftmax) -> PartialSoftmax:
        tiles = iteration * tiles_at_once + jnp.arange(tiles_at_once, dtype=jnp.int32)
        rows, numbers = decode_tiles.rows_and_numbers(tiles)
        firsts = options.first_visible(plan.context_lens[rows] - 1)
        key, value, positions = _gather_tiles(pool, plan, (rows, numbers), firsts, query.dtype)
        ends = plan.context_lens[rows]
        visible = (positions < ends[:, None]) & (positions >= firsts[:, None])
        rows = jnp.minimum(rows, num_rows)
        scores = options.finish_scores(dot("pkgd,ptkd->pkgt", query[rows], key))
        tile = tile_softmax(scores, visible[:, None, None, :], "pkgt,ptkd->pkgd", value)
        return carry.merge_rows(tile, rows)

    start = PartialSoftmax.empty((num_rows + 1, *heads), head_dim)
    num_iterations = -(-decode_tiles.count // tiles_at_once)
    softmax = lax.fori_loop(0, num_iterations, step, start)
    out = options.scale_values(softmax.normalised(options.sinks)[:num_rows])
    return out.astype(query.dtype)


def _attend_prefills(
    query: Float[Array, "T K G D"],
    pool: Num[Array, "N B K2 D"],
    plan: XlaPlan,
    options: _Options,
    decoded: Float[Array, "R K G D"],
) -> Float[Array, "T K G D"]:
    """Put the tokens of prefill chunks behind the decoded ones.

    Query tiles are written in the order of their tokens, whole: what a tile writes past the end
    of its chunk is overwritten by the chunk after it, or is padding.
    """
    num_tokens = query.shape[0]
    room = ((0, QUERY_TILE), (0, 0), (0, 0), (0, 0))
    query = jnp.pad(query, room)
    out = jnp.pad(decoded, ((0, num_tokens - decoded.shape[0]), *room[1:]))
    out = jnp.pad(out, room)

    def step(tile: Array, out: Array) -> Array:
        row, number = plan.query_tiles.rows_and_numbers(tile)
        start = plan.query_starts[row] + number * QUERY_TILE
        # Token i of the batch is at position context_len - (query end - i) of its sequence.
        first_position = plan.context_lens[row] - plan.query_starts[row + 1] + start
        tile_query = lax.dynamic_slice_in_dim(query, start, QUERY_TILE)
        attended = _attend_query_tile(tile_query, pool, plan, options, (row, first_position))
        return lax.dynamic_update_slice_in_dim(out, attended, start, 0)

    return lax.fori_loop(0, plan.query_tiles.count, step, out)[:num_tokens]


def _attend_query_tile(
    query: Float[Array, "Q K G D"],
    pool: Num[Array, "N B K2 D"],
    plan: XlaPlan,
    options: _Options,
    start: tuple[Int[Array, ""], Int[Array, ""]],
) -> Float[Array, "Q K G D"]:
    """Q neighbouring tokens of one sequence. start: its row, and the first token's position."""
    row, first_position = start
    num_queries, num_kv_heads, group, head_dim = query.shape
    query_positions = first_position + jnp.arange(num_queries)
    # "K (Q G) D" makes one matmul a KV head of all queries that share it.
    stacked = query.transpose(1, 0, 2, 3).reshape(num_kv_heads, num_queries * group, head_dim)
    end = jnp.minimum(first_position + num_queries, plan.context_lens[row])
    first = options.first_visible(first_position)
    # Queries past the end of the chunk only fill up the tile, but must stay finite.
    last_visible = jnp.minimum(jnp.repeat(query_positions, group), plan.context_lens[row] - 1)
    first_visible = options.first_visible(last_visible)

    def step(number: Array, carry: PartialSoftmax) -> PartialSoftmax:
        tile = row[None], number[None]
        key, value, positions = _gather_tiles(pool, plan, tile, first[None], query.dtype)
        scores = options.finish_scores(dot("kqd,tkd->kqt", stacked, key[0]))
        visible = (positions <= last_visible[:, None]) & (positions >= first_visible[:, None])
        return carry.merge(tile_softmax(scores, visible[None], "kqt,tkd->kqd", value[0]))

    empty = PartialSoftmax.empty((num_kv_heads, num_queries * group), head_dim)
    tile_tokens = _tile_tokens(pool)
    softmax = lax.fori_loop(first // tile_tokens, -(-end // tile_tokens), step, empty)
    sinks = None if options.sinks is None else jnp.tile(options.sinks, (1, num_queries))
    out = options.scale_values(softmax.normalised(sinks))
    out = out.reshape(num_kv_heads, num_queries, group, head_dim)
    return out.transpose(1, 0, 2, 3).astype(query.dtype)


def _tile_blocks(pool: Num[Array, "N B K2 D"]) -> int:
    return max(1, TILE // pool.shape[1])


def _tile_tokens(pool: Num[Array, "N B K2 D"]) -> int:
    return _tile_blocks(pool) * pool.shape[1]


def _gather_tiles(
    pool: Num[Array, "N B K2 D"],
    plan: XlaPlan,
    tiles: tuple[Int[Array, "P"], Int[Array, "P"]],
    firsts: Int[Array, "P"],
    dtype: jnp.dtype,
) -> tuple[Float[Array, "P C K D"], Float[Array, "P C K D"], Int[Array, "P C"]]:
    """Keys, values and positions of the C tokens of each tile.

    tiles: their rows, and their numbers within the rows. firsts: first position that is of use.
    Slots before it and behind the end of a sequence may hold anything, NaN included: values are
    zeroed there, because a weight of 0 would not silence them.
    """
    rows, numbers = tiles
    num_tiles, (_, block_size, _, head_dim) = rows.shape[0], pool.shape
    tile_blocks = _tile_blocks(pool)
    columns = numbers[:, None] * tile_blocks + jnp.arange(tile_blocks)[None, :]
    blocks = plan.block_tables[rows[:, None], columns]
    tokens = pool[blocks].reshape(num_tiles, tile_blocks * block_size, -1, head_dim)
    if pool.dtype.itemsize == 1:
        tokens = tokens.astype(dtype)
    positions = numbers[:, None] * (tile_blocks * block_size) + jnp.arange(tokens.shape[1])[None, :]
    is_used = (positions < plan.context_lens[rows][:, None]) & (positions >= firsts[:, None])
    values = jnp.where(is_used[:, :, None, None], tokens[:, :, 1::2], 0)
    return tokens[:, :, 0::2], values, positions


def _along_heads(
    scales: Float[Array, "K"], like: Float[Array, "... K Q C"]
) -> Float[Array, "... K Q C"]:
    return jnp.broadcast_to(scales[:, None, None], like.shape)
