"""The sampler against float64 numpy, and the properties of its noise."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jpaged.execution.sampler import (
    argmax,
    gumbel_noise,
    sample,
    sample_tokens,
    top_k_filter,
    top_p_filter,
)
from jpaged.execution.step_inputs import SamplingInput
from jpaged.sampling_params import MAX_REPORTED_TOKENS

pytestmark = pytest.mark.smoke

KEY = jax.random.key(0)


def inputs(
    num_rows,
    *,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    seeds=None,
    positions=None,
    num_logprobs=-1,
    targets=-1,
):
    def column(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (num_rows,))

    return SamplingInput(
        slots=jnp.arange(num_rows, dtype=jnp.int32),
        positions=column(5 if positions is None else positions, jnp.int32),
        seeds_low=column(np.arange(num_rows) if seeds is None else seeds, jnp.int32),
        seeds_high=column(0, jnp.int32),
        top_k=column(top_k, jnp.int32),
        num_logprobs=column(num_logprobs, jnp.int32),
        targets=column(targets, jnp.int32),
        temperature=column(temperature, jnp.float32),
        top_p=column(top_p, jnp.float32),
    )


run = jax.jit(partial(sample_tokens, unroll=False))
reported = jax.jit(partial(sample, unroll=False))


@jax.jit
def filtered(logits, top_k, top_p):
    return top_p_filter(top_k_filter(logits, top_k, unroll=False), top_p, unroll=False)


def kept_by_oracle(logits, top_k, top_p):
    """Indices kept by top-k, then top-p; ties are broken by the lower index."""
    logits = np.asarray(logits, np.float64)
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[: top_k if 0 < top_k < len(logits) else len(logits)]
    if top_p < 1:
        weights = np.exp(logits[order] - logits.max())
        mass = np.cumsum(weights / weights.sum())
        # A sum this close to top_p may fall on either side in float32.
        if np.abs(mass - top_p).min() < 1e-5:
            return None
        order = order[: np.searchsorted(mass, top_p) + 1]
    return set(order.tolist())


@settings(max_examples=200)
@given(
    # Few distinct values, so that there are ties; -0.0 ties with 0.0.
    logits=st.lists(
        st.sampled_from([-3.0, -0.5, -0.0, 0.0, 0.25, 1.0, 1.5, 4.0, 4.5]), min_size=9, max_size=9
    ),
    top_k=st.integers(-1, 11),
    top_p=st.sampled_from([1e-9, 0.1, 0.35, 0.5, 0.77, 0.95, 1.0]),
)
def test_filters_keep_what_sorting_keeps(logits, top_k, top_p):
    """O-18: k first, then p on what is left; exactly k at ties; never an empty set."""
    row = jnp.array([logits], jnp.float32)
    kept = filtered(row, jnp.array([top_k], jnp.int32), jnp.array([top_p], jnp.float32))
    ours = set(np.flatnonzero(np.isfinite(np.asarray(kept)[0])).tolist())
    expected = kept_by_oracle(logits, top_k, top_p)
    assert ours and (expected is None or ours == expected)


def test_filters_on_a_real_vocabulary():
    random = np.random.default_rng(0)
    logits = random.normal(size=(4, 49_152)).astype(np.float32) * 3
    for top_k, top_p in [(50, 1.0), (0, 0.9), (50, 0.9), (1, 0.5), (1000, 0.999)]:
        top_ks, top_ps = jnp.full(4, top_k, jnp.int32), jnp.full(4, top_p, jnp.float32)
        kept = filtered(jnp.array(logits), top_ks, top_ps)
        for row in range(4):
            ours = set(np.flatnonzero(np.isfinite(np.asarray(kept)[row])).tolist())
            expected = kept_by_oracle(logits[row], top_k, top_p)
            assert expected is None or ours == expected


def test_k_before_p():
    """O-18: of .1/.2/.3/.4 with k = 2, .4 has .57 of what is left and alone reaches p = 0.5."""
    logits = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]] * 200, jnp.float32))
    assert set(np.asarray(run(logits, inputs(200, top_k=2, top_p=0.5), KEY)).tolist()) == {3}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_top_k_of_one_is_greedy(temperature):
    logits = jnp.array(np.random.default_rng(1).normal(size=(64, 97)), jnp.float32)
    tokens = run(logits, inputs(64, temperature=temperature, top_k=1), KEY)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=1))


def test_argmax_takes_the_first_of_equals():
    values = jnp.array([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-2.0, -1.0, -3.0, -1.0]])
    np.testing.assert_array_equal(argmax(values), [1, 0, 1])


@pytest.mark.parametrize("top_k,top_p", [(0, 1.0), (4, 1.0), (0, 0.8)])
def test_draws_follow_the_distribution(top_k, top_p):
    """Chi-square over 4000 seeds."""
    probabilities = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
    num_draws, temperature = 4000, 1.3
    logits = jnp.broadcast_to(jnp.log(jnp.array(probabilities, jnp.float32)), (num_draws, 6))
    params = inputs(num_draws, temperature=temperature, top_k=top_k, top_p=top_p)
    counts = np.bincount(np.asarray(run(logits, params, KEY)), minlength=6)
    scaled = np.log(probabilities) / temperature
    kept = sorted(kept_by_oracle(scaled, top_k, top_p))
    expected = np.zeros(6)
    expected[kept] = np.exp(scaled[kept])
    expected *= num_draws / expected.sum()
    assert counts[expected == 0].sum() == 0
    statistic = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert statistic < 20.5, "beyond the 99.9 % quantile of 5 degrees of freedom"


def test_a_draw_depends_on_seed_and_position_alone():
    """O-15: not on the row, nor on the neighbours and what they ask for."""
    random = np.random.default_rng(2)
    row = random.normal(size=101).astype(np.float32)
    alone = run(jnp.array([row]), inputs(1, seeds=[42], positions=[9], temperature=0.8), KEY)[0]
    for place in range(4):
        logits = random.normal(size=(4, 101)).astype(np.float32)
        logits[place] = row
        seeds, positions = random.integers(0, 99, (2, 4))
        temperature, top_k = np.array([0.0, 1.3, 0.5, 1.0], np.float32), np.array([3, 0, 0, 5])
        seeds[place], positions[place] = 42, 9
        temperature[place], top_k[place] = 0.8, 0
        params = inputs(4, seeds=seeds, positions=positions, temperature=temperature, top_k=top_k)
        assert run(jnp.array(logits), params, KEY)[place] == alone


def test_noise_differs_by_seed_position_and_engine_seed():
    base = inputs(1, seeds=[1], positions=[1])
    noise = np.asarray(gumbel_noise(base, KEY, 16))
    for other in (inputs(1, seeds=[2], positions=[1]), inputs(1, seeds=[1], positions=[2])):
        assert not np.array_equal(noise, gumbel_noise(other, KEY, 16))
    assert not np.array_equal(noise, gumbel_noise(base, jax.random.key(1), 16))
    np.testing.assert_array_equal(noise, gumbel_noise(base, KEY, 16))


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("top_p", [1.0, 1e-4])
def test_tiny_temperatures_are_greedy(temperature, top_p):
    """O-17: no overflow to NaN, no run of one filler token."""
    logits = np.random.default_rng(3).normal(size=(32, 211)).astype(np.float32) * 10
    best = np.sort(logits, axis=1)
    has_gap = best[:, -1] - best[:, -2] > 0.05
    tokens = run(jnp.array(logits), inputs(32, temperature=temperature, top_p=top_p), KEY)
    np.testing.assert_array_equal(np.asarray(tokens)[has_gap], logits.argmax(1)[has_gap])


def test_what_fills_a_vocabulary_up_is_never_sampled_or_reported():
    """Nor does it change what is, whatever the filters; and a row of NaNs names a real token."""
    rows = np.random.default_rng(3).normal(size=(6, 211)).astype(np.float32)
    rows[5] = np.nan
    filled = np.pad(rows, ((0, 0), (0, 13)), constant_values=-np.inf)
    temperature, top_k, top_p = [0, 1, 1, 30, 1, 1], [0, 0, 500, 0, 7, 0], [1, 1, 0.9, 0.99, 1, 1]
    params = inputs(6, temperature=temperature, top_k=top_k, top_p=top_p, num_logprobs=20)
    expected, found = (reported(jnp.array(each), params, KEY) for each in (rows, filled))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.top_ids[:5], expected.top_ids[:5])
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert max(found.tokens) < 211


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_are_those_of_the_model(temperature):
    """O-23: before temperature and filters; the sampled token has the same value in both places;
    rows with a target report that one's."""
    logits = np.random.default_rng(5).normal(size=(6, 300)).astype(np.float32) * 4
    targets = [-1, 0, -1, 299, -1, -1]
    params = inputs(
        6, temperature=temperature, top_k=5, num_logprobs=[-1, 0, 1, 5, 20, -1], targets=targets
    )
    samples = reported(jnp.array(logits), params, KEY)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(samples.tokens, run(jnp.array(logits), params, KEY))
    for row in range(6):
        token = int(samples.tokens[row]) if targets[row] < 0 else targets[row]
        assert abs(float(samples.logprobs[row]) - expected[row, token]) < 1e-5
        order = np.argsort(-expected[row], kind="stable")[:MAX_REPORTED_TOKENS]
        np.testing.assert_array_equal(samples.top_ids[row], order)
        np.testing.assert_allclose(samples.top_logprobs[row], expected[row, order], atol=1e-5)


def test_no_logprobs_when_nobody_asks():
    logits = jnp.array(np.random.default_rng(5).normal(size=(2, 30)), jnp.float32)
    samples = reported(logits, inputs(2, temperature=0.0), KEY)
    assert not np.asarray(samples.logprobs).any() and not np.asarray(samples.top_ids).any()


def test_no_likely_tokens_when_rows_want_only_their_own():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 50)), jnp.float32)

    def report(num_logprobs):
        return reported(logits, inputs(3, num_logprobs=num_logprobs), KEY)

    own, all_of_them = report(np.array([0, -1, 0])), report(np.array([0, 2, 0]))
    np.testing.assert_array_equal(own.logprobs, all_of_them.logprobs)
    assert (np.asarray(own.logprobs) < 0).all()
    assert not np.asarray(own.top_ids).any() and not np.asarray(own.top_logprobs).any()
    assert np.asarray(all_of_them.top_ids)[1, 0] == np.asarray(logits)[1].argmax()


def test_searches_run_only_for_batches_that_want_them(monkeypatch):
    """Counted as the program runs: zeros in its results may have been paid for, too."""
    ran = []
    top_k = lax.top_k

    def counted(*operands):
        jax.debug.callback(lambda: ran.append("top_k"))
        return top_k(*operands)

    monkeypatch.setattr(lax, "top_k", counted)
    program = jax.jit(partial(sample, unroll=False))  # traced anew
    logits = jnp.zeros((2, 50), jnp.float32)
    for num_logprobs, expected in (-1, []), (0, []), ([-1, 1], ["top_k"]):
        jax.block_until_ready(program(logits, inputs(2, num_logprobs=num_logprobs), KEY))
        jax.effects_barrier()
        assert ran == expected
