"""The sampler on a vocabulary that is split over devices."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jpaged.execution.sampler import Samples, VocabularyParts, sample, top_k_filter, top_p_filter
from jpaged.sampling_params import MAX_REPORTED_TOKENS
from tests.execution.test_sampler import inputs

NUM_ROWS, VOCAB_SIZE = 7, 1024
KEY = jax.random.key(3)
LOGITS = np.random.default_rng(0).normal(size=(NUM_ROWS, VOCAB_SIZE)).astype(np.float32).round(1)
MIXED = inputs(
    NUM_ROWS,
    temperature=[0, 1, 1, 0.5, 2, 1, 0.7],
    top_k=[0, 5, 0, 3, 0, 300, 1],
    top_p=[1, 1, 0.5, 0.9, 0.3, 1, 1],
    num_logprobs=[-1, 0, 20, -1, 5, 3, 1],
    targets=[-1, -1, 700, -1, -1, -1, -1],
)


@pytest.fixture(scope="module", params=[2, 8])
def parts(request: pytest.FixtureRequest) -> VocabularyParts:
    """A vocabulary on 2 or 8 devices."""
    devices = np.array(jax.devices()[: request.param])
    return VocabularyParts(Mesh(devices.reshape(1, -1), ("dp", "tp")), "tp")


def sampled_on(parts: VocabularyParts) -> tuple[Samples, str]:
    """Sample from `LOGITS`, and return the compiled program's text, too."""
    logits = jax.device_put(LOGITS, NamedSharding(parts.mesh, P(None, parts.axis)))
    columns, structure = jax.tree.flatten(MIXED)

    @jax.jit
    def function(logits, *columns):
        inputs = jax.tree.unflatten(structure, columns)
        return jax.tree.leaves(sample(logits, inputs, KEY, unroll=False, parts=parts))

    text = function.lower(logits, *columns).compile().as_text() or ""
    return Samples(*function(logits, *columns)), text


def test_the_same_samples_as_on_one_device(parts: VocabularyParts) -> None:
    """Ids are equal, ties included: many logits have the same value, over all parts."""
    found, _ = sampled_on(parts)
    expected = jax.jit(partial(sample, unroll=False))(LOGITS, MIXED, KEY)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.top_ids, expected.top_ids)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)


def test_devices_exchange_no_logits(parts: VocabularyParts) -> None:
    """What they exchange is no larger than the most likely tokens of each part."""
    _, text = sampled_on(parts)
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    results = re.findall(rf"= (\S+|\([^)]*\)) (?:{names})(?:-start)?\(", text)
    shapes = [shape for result in results for shape in re.findall(r"\[([\d,]*)\]", result)]
    sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
    assert sizes and max(sizes) <= NUM_ROWS * parts.num * MAX_REPORTED_TOKENS
    assert max(sizes) < NUM_ROWS * VOCAB_SIZE


@pytest.mark.parametrize("unroll", [False, True])
def test_unrolled_filters_have_no_loops(unroll: bool) -> None:
    """A GPU could not run them as one graph."""

    def filtered(logits, top_k, top_p):
        return top_p_filter(top_k_filter(logits, top_k, unroll=unroll), top_p, unroll=unroll)

    row = jnp.zeros(NUM_ROWS)
    text = jax.jit(filtered).lower(jnp.zeros((NUM_ROWS, 8)), row.astype(int), row).as_text()
    assert ("stablehlo.while" in text) == (not unroll)
