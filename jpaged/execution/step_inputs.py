"""What crosses into the compiled programs: one packed integer array for the forward pass, and one
integer and one float array for sampling.

Shapes depend on bucket sizes only, and every field is always there, so that no request can cause
a compilation. A token id that only the device knows yet is sent as `~slot`: the program takes it
from `last_token[slot]`.
"""

from dataclasses import dataclass, fields
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import AttentionMetadata

AnyArray = TypeVar("AnyArray", np.ndarray, Array)


@dataclass(frozen=True)
class ForwardShape:
    """Sizes of one forward program.

    num_tokens: T. num_rows: S. num_table_blocks: M. num_outputs: rows of hidden states handed to
    the sampler. decode_only: every row is a decode or padding, and row s is token s.
    """

    num_tokens: int
    num_rows: int
    num_table_blocks: int
    num_outputs: int
    decode_only: bool

    @property
    def fields(self) -> dict[str, tuple[int, ...]]:
        """Fields of the packed array, in order."""
        return {
            "token_ids": (self.num_tokens,),
            "block_tables": (self.num_rows, self.num_table_blocks),
            "context_lens": (self.num_rows,),
            "query_starts": (self.num_rows + 1,),
            "num_decodes": (),
            "output_tokens": (self.num_outputs,),
        }

    @property
    def packed_size(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.fields.values())

    def split(self, packed: AnyArray) -> dict[str, AnyArray]:
        """Views of the packed array by name; works on numpy and inside jit."""
        views, offset = {}, 0
        for name, shape in self.fields.items():
            size = int(np.prod(shape))
            views[name] = packed[offset : offset + size].reshape(shape)
            offset += size
        return views


@dataclass(frozen=True)
class ForwardInput:
    """Unpacked inside jit. output_tokens: the tokens whose hidden states are sampled from."""

    token_ids: Int[Array, "T"]
    rows: Int[Array, "T"]
    positions: Int[Array, "T"]
    output_tokens: Int[Array, "O"]
    attention: AttentionMetadata


def unpack_forward(
    packed: Int[Array, "I"], last_token: Int[Array, "R"], shape: ForwardShape
) -> ForwardInput:
    """Rows and positions follow from the lengths; padding tokens get row S and position 0."""
    views = shape.split(packed)
    known, context_lens, query_starts = (
        views["token_ids"],
        views["context_lens"],
        views["query_starts"],
    )
    on_device = last_token.at[~known].get(mode="fill", fill_value=0)
    tokens = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    # A binary search is a loop, which keeps a GPU from running the step as one graph.
    rows = jnp.searchsorted(query_starts[1:], tokens, side="right", method="compare_all")
    rows = rows.astype(jnp.int32)
    ends, lens = (jnp.append(values, 0) for values in (query_starts[1:], context_lens))
    is_real = rows < shape.num_rows
    return ForwardInput(
        token_ids=jnp.where(known < 0, on_device, known),
        rows=rows,
        positions=jnp.where(is_real, lens[rows] - (ends[rows] - tokens), 0),
        output_tokens=views["output_tokens"],
        attention=AttentionMetadata(
            block_tables=views["block_tables"],
            context_lens=context_lens,
            query_starts=query_starts,
            num_decodes=views["num_decodes"],
        ),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInput:
    """One entry a row that is sampled.

    slots: where the sampled token goes in `last_token`; out of range for padding.
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


NUM_SAMPLING_INTS = 7
NUM_SAMPLING_FLOATS = len(fields(SamplingInput)) - NUM_SAMPLING_INTS


def unpack_sampling(ints: Int[Array, "7 S"], floats: Float[Array, "2 S"]) -> SamplingInput:
    return SamplingInput(*ints, *floats)


def sampling_columns(
    ints: Int[np.ndarray, "7 S"], floats: Float[np.ndarray, "2 S"]
) -> dict[str, np.ndarray]:
    """Views of the packed arrays by the names of `SamplingInput`'s fields."""
    names = [item.name for item in fields(SamplingInput)]
    return dict(zip(names, [*ints, *floats], strict=True))
