"""What crosses from the host into the compiled programs: one packed integer array a step.

Shapes depend on bucket sizes only, and every field is always there, so that no request can cause
a compilation. What a step needs of its requests besides is in the device's `SlotState`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.execution.slot_state import SlotColumn, SlotState
from pallas_kernels.paged_attention import AttentionMetadata

AnyArray = TypeVar("AnyArray", np.ndarray, Array)

NO_LOGPROBS = -1
NO_TARGET = -1
MIN_WRITES = 16
TOKENS_A_WRITE = 8  # the smallest block size: a prompt fills at most one table entry in so many


@dataclass(frozen=True)
class ForwardShape:
    """Sizes of one forward program.

    num_tokens: T. num_rows: S. num_outputs: rows of hidden states handed to the sampler.
    decode_only: every row is a decode or padding, and row s is token s.
    """

    num_tokens: int
    num_rows: int
    num_outputs: int
    decode_only: bool

    @property
    def num_writes(self) -> int:
        """Changes of the state that travel with a step: enough for new blocks of all its tokens.

        More of them, as when a long prompt is found in the prefix cache, go ahead of the step.
        """
        return max(MIN_WRITES, self.num_rows + self.num_tokens // TOKENS_A_WRITE)

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Fields of the packed array, in order.

        writes: as `SlotState.write` takes them. They come before everything else.
        token_ids: `~slot` stands for the token that was sampled last for the slot.
        slots: of each row; past the last slot for padding.
        output_tokens: tokens of the step whose hidden states are handed to the sampler.
        output_slots: where sampling takes its parameters from; past the last slot for padding.
        output_targets: token of the prompt to score instead of sampling one, or `NO_TARGET`.
        """
        return {
            "writes": (2, self.num_writes),
            "token_ids": (self.num_tokens,),
            "slots": (self.num_rows,),
            "query_starts": (self.num_rows + 1,),
            "num_decodes": (),
            "output_tokens": (self.num_outputs,),
            "output_slots": (self.num_outputs,),
            "output_targets": (self.num_outputs,),
        }

    @property
    def packed_size(self) -> int:
        return sum(math.prod(shape) for shape in self.fields.values())

    def split(self, packed: AnyArray) -> dict[str, AnyArray]:
        """Views of the packed array by name; works on numpy and inside jit."""
        views, offset = {}, 0
        for name, shape in self.fields.items():
            size = math.prod(shape)
            views[name] = packed[offset : offset + size].reshape(shape)
            offset += size
        return views


class Outputs(NamedTuple):
    """What a forward program hands to the sampler: a row for each token that is asked for.

    positions: of the token that follows. slots, targets: as `ForwardShape.fields` has them.
    """

    hidden: Float[Array, "O E"]
    positions: Int[Array, "O"]
    slots: Int[Array, "O"]
    targets: Int[Array, "O"]

    @classmethod
    def abstract(cls, num_outputs: int, hidden_size: int, dtype: jnp.dtype) -> "Outputs":
        """Return the shapes of outputs."""

        def zeros() -> Outputs:
            numbers = jnp.zeros(num_outputs, jnp.int32)
            return cls(jnp.zeros((num_outputs, hidden_size), dtype), numbers, numbers, numbers)

        return jax.eval_shape(zeros)

    def first(self, num_rows: int) -> "Outputs":
        """Return the first rows."""
        return Outputs(*(values[:num_rows] for values in self))


@dataclass(frozen=True)
class ForwardInput:
    """Unpacked inside jit. output_tokens, output_slots, output_targets: see `ForwardShape`."""

    token_ids: Int[Array, "T"]
    rows: Int[Array, "T"]
    positions: Int[Array, "T"]
    output_tokens: Int[Array, "O"]
    output_slots: Int[Array, "O"]
    output_targets: Int[Array, "O"]
    attention: AttentionMetadata

    def outputs(self, hidden: Float[Array, "T E"]) -> Outputs:
        """Pick what is asked for of the hidden states."""
        return Outputs(
            hidden=hidden[self.output_tokens],
            positions=self.positions[self.output_tokens] + 1,
            slots=self.output_slots,
            targets=self.output_targets,
        )


def unpack_forward(
    packed: Int[Array, "I"], state: SlotState, shape: ForwardShape
) -> tuple[ForwardInput, SlotState]:
    """Return the input of a step and the state behind it, in which its tokens are computed.

    Rows and positions follow from the lengths; padding tokens get row S and position 0.
    """
    views = shape.split(packed)
    state = state.write(views["writes"])
    known, slots, query_starts = views["token_ids"], views["slots"], views["query_starts"]
    starts = state.column(SlotColumn.NUM_COMPUTED, slots)
    context_lens = starts + jnp.diff(query_starts)
    on_device = state.column(SlotColumn.LAST_TOKEN, ~known)
    tokens = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    # A binary search is a loop, which keeps a GPU from running the step as one graph.
    rows = jnp.searchsorted(query_starts[1:], tokens, side="right", method="compare_all")
    rows = rows.astype(jnp.int32)
    ends, lens = (jnp.append(values, 0) for values in (query_starts[1:], context_lens))
    is_real = rows < shape.num_rows
    inputs = ForwardInput(
        token_ids=jnp.where(known < 0, on_device, known),
        rows=rows,
        positions=jnp.where(is_real, lens[rows] - (ends[rows] - tokens), 0),
        output_tokens=views["output_tokens"],
        output_slots=views["output_slots"],
        output_targets=views["output_targets"],
        attention=AttentionMetadata(
            block_tables=state.tables_of(slots),
            context_lens=context_lens,
            query_starts=query_starts,
            num_decodes=views["num_decodes"],
        ),
    )
    return inputs, state.with_column(SlotColumn.NUM_COMPUTED, slots, context_lens)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInput:
    """One entry a row that is sampled.

    slots: where the sampled token is kept; past the last slot if it is not.
    positions: the sampled token's position in its sequence; with the seed it decides the noise.
    seeds_low, seeds_high: the two halves of a 64-bit seed.
    num_logprobs: most likely tokens to report; 0 reports the sampled one alone, -1 nothing.
    targets: the token whose log-probability is reported instead of the sampled one's; -1: none.
    """

    slots: Int[Array, "S"]
    positions: Int[Array, "S"]
    seeds_low: Int[Array, "S"]
    seeds_high: Int[Array, "S"]
    top_k: Int[Array, "S"]
    num_logprobs: Int[Array, "S"]
    targets: Int[Array, "S"]
    temperature: Float[Array, "S"]
    top_p: Float[Array, "S"]


def sampling_input(outputs: Outputs, state: SlotState) -> SamplingInput:
    """Return the parameters of each output's slot.

    Padding and rows that are only scored are greedy and have no filter, so that they never make
    a cheap batch an expensive one. Padding reports nothing.
    """
    num_slots = state.columns.shape[0]
    is_padding = outputs.slots >= num_slots
    is_scored = outputs.targets != NO_TARGET
    is_sampled = ~(is_padding | is_scored)

    def column(column: SlotColumn) -> Int[Array, "S"]:
        return state.column(column, outputs.slots)

    def float_column(column: SlotColumn) -> Float[Array, "S"]:
        return lax.bitcast_convert_type(state.column(column, outputs.slots), jnp.float32)

    num_logprobs = jnp.where(
        is_scored, column(SlotColumn.NUM_PROMPT_LOGPROBS), column(SlotColumn.NUM_LOGPROBS)
    )
    return SamplingInput(
        slots=jnp.where(is_sampled, outputs.slots, num_slots),
        positions=outputs.positions,
        seeds_low=column(SlotColumn.SEED_LOW),
        seeds_high=column(SlotColumn.SEED_HIGH),
        top_k=jnp.where(is_sampled, column(SlotColumn.TOP_K), 0),
        num_logprobs=jnp.where(is_padding, NO_LOGPROBS, num_logprobs),
        targets=outputs.targets,
        temperature=jnp.where(is_sampled, float_column(SlotColumn.TEMPERATURE), 0.0),
        top_p=jnp.where(is_sampled, float_column(SlotColumn.TOP_P), 1.0),
    )
