"""Scores of beam search, for every penalty and length that is accepted."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.outputs import TokenLogprobs
from jpaged.scheduling.beam_search import BeamSearch, reported_score

LENGTHS = st.integers(1, 2**20)
PENALTIES = st.floats(-100, 100)
LOGPROBS = st.floats(-1e7, -1e-7)


def score(length: int, length_penalty: float, cumulative_logprob: float):
    search = BeamSearch(
        2, num_candidates=4, max_tokens=2**21, length_penalty=length_penalty, early_stopping=False
    )
    search.num_tokens = length
    return search.score(cumulative_logprob)


@given(penalty=PENALTIES, lengths=st.tuples(LENGTHS, LENGTHS), sums=st.tuples(LOGPROBS, LOGPROBS))
def test_any_penalty_orders_any_lengths(penalty, lengths, sums):
    """O-22: 1300 ** 100 is too large for a float, and 1800 ** -100 too small to divide by."""
    one, other = (score(n, penalty, total) for n, total in zip(lengths, sums, strict=True))
    # The same comparison with logarithms, which tell less about scores that are nearly equal.
    keys = [penalty * math.log(n) - math.log(-x) for n, x in zip(lengths, sums, strict=True)]
    if not math.isclose(*keys, rel_tol=1e-9, abs_tol=1e-9):
        assert (one > other) == (keys[0] > keys[1])
    assert all(math.isfinite(reported_score(each)) for each in (one, other))


@given(length=st.integers(1, 1000), penalty=st.floats(-4, 4), total=LOGPROBS)
def test_scores_are_those_of_transformers(length, penalty, total):
    assert float(score(length, penalty, total)) == pytest.approx(total / length**penalty)


@pytest.mark.parametrize("length_penalty", [-100.0, -1.0, 0.0, 1.0, 100.0])
def test_a_long_search_ends_with_the_best(length_penalty):
    search = BeamSearch(
        1,
        num_candidates=2,
        max_tokens=2000,
        length_penalty=length_penalty,
        early_stopping=False,
    )
    report = TokenLogprobs(-0.5, ((5, -0.5), (6, -1.0)))
    steps = 1
    while (step := search.advance([report], lambda candidate: candidate.token_id == 6)).survivors:
        steps += 1
    assert steps == 2000 and len(step.hypotheses) == 1
