"""What the device keeps of running requests from step to step, with a row for each slot.

Every step program takes the state, changes it in place and hands it on. The host sends only what
changes, as pairs of an address and a value: a row of the state is its columns and then its block
table, and addresses count through these rows. So one array of pairs carries every kind of change,
and its size does not depend on how long a block table can be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int


class SlotColumn(IntEnum):
    """Numbers that the device keeps of each slot.

    LAST_TOKEN: the token sampled last. The device alone writes it.
    NUM_COMPUTED: tokens whose K/V are in the pool. The device counts on from what the host wrote.
    SEED_LOW, SEED_HIGH: the two halves of a 64-bit seed, as bit patterns.
    TOP_K, TEMPERATURE, TOP_P: of `SamplingParams`; the last two are the bits of a float32.
    NUM_LOGPROBS: most likely tokens to report with each sampled one; 0 reports the sampled one
        alone, -1 nothing. NUM_PROMPT_LOGPROBS: the same with each token of the prompt.
    """

    LAST_TOKEN = 0
    NUM_COMPUTED = 1
    SEED_LOW = 2
    SEED_HIGH = 3
    TOP_K = 4
    NUM_LOGPROBS = 5
    NUM_PROMPT_LOGPROBS = 6
    TEMPERATURE = 7
    TOP_P = 8


@dataclass(frozen=True)
class SlotShape:
    """Sizes of a state: R slots, and M blocks of the longest sequence."""

    num_slots: int
    num_table_blocks: int

    @property
    def row_size(self) -> int:
        """Addresses of one slot."""
        return len(SlotColumn) + self.num_table_blocks

    @property
    def num_addresses(self) -> int:
        """Number of addresses; this one and all larger ones stand for no place."""
        return self.num_slots * self.row_size

    def abstract(self) -> "SlotState":
        """Return the shapes of a state."""
        return jax.eval_shape(lambda: SlotState.zeros(self))

    def column_addresses(
        self, slots: Int[np.ndarray, "S"], column: SlotColumn
    ) -> Int[np.ndarray, "S"]:
        """Return where the column of each slot is."""
        return slots * self.row_size + column

    def table_addresses(self, slot: int, first: int, end: int) -> Sequence[int]:
        """Return where the blocks [first, end) of the slot's table are."""
        start = slot * self.row_size + len(SlotColumn)
        return range(start + first, start + end)


class SlotState(NamedTuple):
    """A pytree that is donated to every program that takes it.

    columns: int32, by `SlotColumn`.
    block_tables: int32. Row s begins with the blocks of the request in slot s, in order. Behind
        those that hold its tokens, the row has whatever was there before.
    """

    columns: Int[Array, "R C"]
    block_tables: Int[Array, "R M"]

    @classmethod
    def zeros(cls, shape: SlotShape, sharding: NamedSharding | None = None) -> Self:
        """Make the state of an engine in which nothing has run."""
        columns = (shape.num_slots, len(SlotColumn))
        return cls(
            columns=jnp.zeros(columns, jnp.int32, device=sharding),
            block_tables=jnp.zeros(
                (shape.num_slots, shape.num_table_blocks), jnp.int32, device=sharding
            ),
        )

    def write(self, writes: Int[Array, "2 W"]) -> "SlotState":
        """Put values at addresses. writes: row 0 has the addresses, row 1 the values.

        No address may occur twice. Those past the last slot are left out.
        """
        (addresses, values), num_columns = writes, len(SlotColumn)
        num_table_blocks = self.block_tables.shape[1]
        slots, places = jnp.divmod(addresses, num_columns + num_table_blocks)
        is_column = places < num_columns
        # An index past the end, which drops the write, leads out of the array it is not meant for.
        columns = jnp.where(is_column, places, num_columns)
        blocks = jnp.where(is_column, num_table_blocks, places - num_columns)
        return SlotState(
            columns=self.columns.at[slots, columns].set(values, mode="drop"),
            block_tables=self.block_tables.at[slots, blocks].set(values, mode="drop"),
        )

    def column(self, column: SlotColumn, slots: Int[Array, "S"]) -> Int[Array, "S"]:
        """Return the column of each slot, and 0 for slots past the last one."""
        return self.columns.at[slots, int(column)].get(mode="fill", fill_value=0)

    def with_column(
        self, column: SlotColumn, slots: Int[Array, "S"], values: Int[Array, "S"]
    ) -> "SlotState":
        """Return the state with new values in the column; slots past the last one are left out."""
        columns = self.columns.at[slots, int(column)].set(values, mode="drop")
        return self._replace(columns=columns)

    def tables_of(self, slots: Int[Array, "S"]) -> Int[Array, "S M"]:
        """Return the block table of each slot, and zeros for slots past the last one."""
        return self.block_tables.at[slots].get(mode="fill", fill_value=0)
