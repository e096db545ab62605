"""Logits to token ids, inside jit.

Order: temperature, top-k, top-p, then Gumbel-argmax (Gumbel 1954; Maddison et al. 2014), which
draws from the softmax of what is left. The noise of a row depends on its seed and position alone,
so an answer does not change with the batch, the slot, a preemption or the order of requests.

Sets are found without sorting: the threshold of top-k and of top-p is searched by bisection on
the bits of the float, one reduction a bit. Ties at the threshold are cut by token id, lowest
first, so that exactly k candidates are kept.

Logits may be split over devices by parts of the vocabulary. Then devices exchange what reductions
leave of their parts, a few numbers a row, and never the logits.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jpaged.execution.step_inputs import SamplingInput
from jpaged.sampling_params import MAX_REPORTED_TOKENS

NEGATIVE_INFINITY = float("-inf")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Samples:
    """What is sampled for each row.

    The log-probabilities are those of the model's own distribution, before temperature and
    filters, so that they say the same whatever the parameters. They are zeros when no row asked.

    logprobs: of the sampled token, or of the row's target.
    top_ids, top_logprobs: of the most likely tokens, best first.
    """

    tokens: Int[Array, "S"]
    logprobs: Float[Array, "S"]
    top_ids: Int[Array, "S P"]
    top_logprobs: Float[Array, "S P"]


@dataclass(frozen=True)
class VocabularyParts:
    """Equal parts of the vocabulary, in order, one on each device along an axis of a mesh."""

    mesh: Mesh
    axis: str

    @property
    def num(self) -> int:
        return self.mesh.shape[self.axis]


def sample(
    logits: Float[Array, "S V"],
    inputs: SamplingInput,
    base_key: Key[Array, ""],
    *,
    unroll: bool,
    parts: VocabularyParts | None = None,
) -> Samples:
    """The next token of each row. Rows with temperature 0 take the most likely one.

    unroll: leave no loops. A loop would leave the CUDA graph of the step; on a CPU, unrolling only
        costs time to compile.
    parts: how the vocabulary is split over devices, if it is.
    """
    tokens = sample_tokens(logits, inputs, base_key, unroll=unroll, parts=parts)
    num_rows, num_top = logits.shape[0], min(MAX_REPORTED_TOKENS, logits.shape[1])

    no_logprobs = jnp.zeros((num_rows, num_top), jnp.float32)
    no_ids = no_logprobs.astype(jnp.int32)

    def report() -> Samples:
        normaliser = jax.nn.logsumexp(logits, axis=1, keepdims=True)

        def report_most_likely() -> tuple[Array, Array]:
            top_logits, top_ids = most_likely(logits, num_top, parts)
            return top_ids, top_logits - normaliser

        # A search through the vocabulary, which rows that report their own token do not need.
        top_ids, top_logprobs = lax.cond(
            jnp.any(inputs.num_logprobs > 0), report_most_likely, lambda: (no_ids, no_logprobs)
        )
        reported = jnp.where(inputs.targets < 0, tokens, inputs.targets)
        chosen = _pick(logits, reported)
        return Samples(tokens, (chosen - normaliser)[:, 0], top_ids, top_logprobs)

    def report_nothing() -> Samples:
        return Samples(tokens, no_logprobs[:, 0], no_ids, no_logprobs)

    return lax.cond(jnp.any(inputs.num_logprobs >= 0), report, report_nothing)


def sample_tokens(
    logits: Float[Array, "S V"],
    inputs: SamplingInput,
    base_key: Key[Array, ""],
    *,
    unroll: bool,
    parts: VocabularyParts | None = None,
) -> Int[Array, "S"]:
    greedy = argmax(logits)
    is_greedy = inputs.temperature == 0

    def draw() -> Int[Array, "S"]:
        temperature = jnp.where(is_greedy, 1.0, inputs.temperature)
        scaled = logits / temperature[:, None]
        has_filter = (inputs.top_k > 0) | (inputs.top_p < 1)

        def filtered() -> Float[Array, "S V"]:
            options = {"unroll": unroll, "parts": parts}
            candidates = top_k_filter(scaled, inputs.top_k, **options)
            return top_p_filter(candidates, inputs.top_p, **options)

        kept = lax.cond(jnp.any(has_filter & ~is_greedy), filtered, lambda: scaled)
        drawn = argmax(kept + gumbel_noise(inputs, base_key, logits.shape[1]))
        return jnp.where(is_greedy, greedy, drawn)

    return lax.cond(jnp.all(is_greedy), lambda: greedy, draw)


def argmax(values: Float[Array, "S V"]) -> Int[Array, "S"]:
    """Index of the largest value, the lowest one among equals; 0 in a row with a NaN.

    Two plain reductions: XLA's own argmax carries pairs, which CPUs do not vectorise.
    """
    largest, size = values.max(axis=1, keepdims=True), values.shape[1]
    index = jnp.arange(size, dtype=jnp.int32)[None, :]
    found = jnp.where(values == largest, index, size).min(axis=1)
    # The last places of a vocabulary may only fill it up.
    return jnp.where(found == size, 0, found)


def gumbel_noise(
    inputs: SamplingInput, base_key: Key[Array, ""], vocab_size: int
) -> Float[Array, "S V"]:
    def row_noise(low: Array, high: Array, position: Array) -> Array:
        key = base_key
        for word in (low, high, position):
            key = jax.random.fold_in(key, word)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row_noise)(inputs.seeds_low, inputs.seeds_high, inputs.positions)


def most_likely(
    logits: Float[Array, "S V"], num_top: int, parts: VocabularyParts | None
) -> tuple[Float[Array, "S P"], Int[Array, "S P"]]:
    """Return the largest logits of each row and their tokens, best first; the lowest token first
    among equals."""
    if parts is None:
        best, ids = lax.top_k(logits, num_top)
        return best, ids

    def most_likely_of_part(part: Float[Array, "S J"]) -> tuple[Array, Array]:
        best, ids = lax.top_k(part, min(num_top, part.shape[1]))
        return best, ids + lax.axis_index(parts.axis).astype(ids.dtype) * part.shape[1]

    # XLA would gather the logits.
    along = PartitionSpec(None, parts.axis)
    best, ids = jax.shard_map(
        most_likely_of_part, mesh=parts.mesh, in_specs=along, out_specs=(along, along)
    )(logits)
    best, places = lax.top_k(best, num_top)
    return best, jnp.take_along_axis(ids, places, axis=1)


def _pick(logits: Float[Array, "S V"], tokens: Int[Array, "S"]) -> Float[Array, "S 1"]:
    """Return the logit of one token of each row, as a sum, which needs no look-up by index."""
    index = jnp.arange(logits.shape[1], dtype=tokens.dtype)[None]
    return jnp.where(index == tokens[:, None], logits, 0).sum(axis=1, keepdims=True)


def top_k_filter(
    logits: Float[Array, "S V"],
    top_k: Int[Array, "S"],
    *,
    unroll: bool,
    parts: VocabularyParts | None = None,
) -> Float[Array, "S V"]:
    """Keep the k largest values of each row; k of 0, below 0 or above V keeps all."""
    vocab_size = logits.shape[1]
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)
    bits = _ordered_bits(logits)

    def is_enough(candidate: UInt32[Array, "S"]) -> Bool[Array, "S"]:
        return (bits >= candidate[:, None]).sum(axis=1, dtype=jnp.int32) >= wanted

    threshold = _largest_threshold(is_enough, logits.shape[0], unroll=unroll)[:, None]
    num_above = (bits > threshold).sum(axis=1, dtype=jnp.int32)
    return _keep(logits, bits, threshold, wanted - num_above, parts=parts)


def top_p_filter(
    logits: Float[Array, "S V"],
    top_p: Float[Array, "S"],
    *,
    unroll: bool,
    parts: VocabularyParts | None = None,
) -> Float[Array, "S V"]:
    """Keep the fewest tokens, most likely first, whose probabilities add up to top_p (Holtzman
    et al. 2020); at least one. Tokens at -inf stay out; top_p of 1 keeps the row as it is."""
    probabilities = jax.nn.softmax(logits, axis=1)
    bits = _ordered_bits(logits)

    def is_enough(candidate: UInt32[Array, "S"]) -> Bool[Array, "S"]:
        mass = jnp.where(bits >= candidate[:, None], probabilities, 0).sum(axis=1)
        return mass >= top_p

    threshold = _largest_threshold(is_enough, logits.shape[0], unroll=unroll)[:, None]
    mass_above = jnp.where(bits > threshold, probabilities, 0).sum(axis=1)
    at_threshold = jnp.where(bits == threshold, probabilities, 0).max(axis=1)
    num_ties = jnp.ceil((top_p - mass_above) / jnp.maximum(at_threshold, 1e-30))
    num_ties = jnp.clip(num_ties, 1, logits.shape[1]).astype(jnp.int32)
    kept = _keep(logits, bits, threshold, num_ties, parts=parts)
    return jnp.where(top_p[:, None] < 1, kept, logits)


def _ordered_bits(values: Float[Array, "S V"]) -> UInt32[Array, "S V"]:
    """Integers in the same order as the floats (two's complement trick of radix sorts)."""
    # -0 must tie with +0. Adding 0 would make it that, but XLA removes such additions.
    values = jnp.where(values == 0, 0.0, values.astype(jnp.float32))
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_threshold(is_enough, num_rows: int, *, unroll: bool) -> UInt32[Array, "S"]:
    """The largest integer for which `is_enough` holds, bit by bit; 0 where it never does."""

    def step(iteration: Array, threshold: Array) -> Array:
        candidate = threshold | lax.shift_left(jnp.uint32(1), jnp.uint32(31) - iteration)
        return jnp.where(is_enough(candidate), candidate, threshold)

    start = jnp.zeros(num_rows, jnp.uint32)
    # Bounds that JAX traces would keep it from unrolling, silently.
    return lax.fori_loop(np.uint32(0), np.uint32(32), step, start, unroll=unroll)


def _keep(
    logits: Float[Array, "S V"],
    bits: UInt32[Array, "S V"],
    threshold: UInt32[Array, "S 1"],
    num_ties: Int[Array, "S"],
    *,
    parts: VocabularyParts | None,
) -> Float[Array, "S V"]:
    """Values above the threshold, and the first `num_ties` of those that equal it."""
    is_tie = bits == threshold
    has_more_ties = is_tie.sum(axis=1, dtype=jnp.int32) > num_ties
    allowed = lax.cond(
        jnp.any(has_more_ties),
        lambda: is_tie & (_counts_up_to(is_tie, parts.num if parts else 1) <= num_ties[:, None]),
        lambda: is_tie,
    )
    return jnp.where((bits > threshold) | allowed, logits, NEGATIVE_INFINITY)


def _counts_up_to(flags: Bool[Array, "S V"], num_parts: int) -> Int[Array, "S V"]:
    """Return how many flags of the row are set up to each place: of the part, and before it."""
    num_rows, vocab_size = flags.shape
    parts = flags.reshape(num_rows, num_parts, vocab_size // num_parts)
    totals = parts.sum(axis=2, dtype=jnp.int32)
    before = jnp.cumsum(totals, axis=1, dtype=jnp.int32) - totals
    counts = jnp.cumsum(parts, axis=2, dtype=jnp.int32) + before[:, :, None]
    return counts.reshape(flags.shape)
