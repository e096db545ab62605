"""Parameters of requests: values of wrong types are refused by name, and -1 is no seed."""

from typing import Any

import numpy as np
import pytest

from jpaged.beam_search_params import BeamSearchParams
from jpaged.errors import RequestError
from jpaged.sampling_params import MAX_SEED, SamplingParams

NOT_NUMBERS: list[Any] = ["1", [1], {}, True, np.True_, 1j, float("nan"), 10**5000, object()]
NOT_BOOLS: list[Any] = [1, 0, "true", [], None, np.int64(1)]
NOT_STRINGS: list[Any] = [5, {"a": 1}, [5], [""], ["a", None], b"ab", True, "x" * 2000, ["x"] * 17]
NOT_IDS: list[Any] = [
    5,
    {5: 1},
    "5",
    b"5",
    [1.5],
    ["a"],
    [True],
    [-1],
    [None],
    np.ones((2, 2)),
    True,
]
SHARED: dict[str, list[Any]] = {
    "n": [*NOT_NUMBERS, 1.0, 0],
    "max_tokens": [*NOT_NUMBERS[:-2], 1.5, -1, 0],
    "stop": NOT_STRINGS,
    "stop_token_ids": NOT_IDS,
    "logprobs": [*NOT_NUMBERS, 1.5, -1, 21],
    "prompt_logprobs": [*NOT_NUMBERS, 1.5, -1, 21],
    **dict.fromkeys(
        ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"), NOT_BOOLS
    ),
}
SAMPLING: dict[str, list[Any]] = {
    "best_of": [*NOT_NUMBERS, 1.5, 0],
    "temperature": [*NOT_NUMBERS, -1, None, np.float32("inf")],
    "top_p": [*NOT_NUMBERS, 0, 1.1],
    "top_k": [*NOT_NUMBERS, 1.0, -2],
    "seed": [*NOT_NUMBERS, 1.5, 2**63, -(2**63) - 1],
}
BEAMS: dict[str, list[Any]] = {
    "beam_width": [*NOT_NUMBERS, 0, 2.0, None],
    "length_penalty": [*NOT_NUMBERS, 101],
    "early_stopping": NOT_BOOLS,
}


def make_beams(**values: Any) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": 2, **values})


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        *((SamplingParams, *item) for item in (SHARED | SAMPLING).items()),
        *((make_beams, *item) for item in (SHARED | BEAMS).items()),
    ],
)
def test_wrong_types_are_refused_by_name(make: Any, name: str, values: list[Any]) -> None:
    """O-62: never as a TypeError of the code that uses the value."""
    for value in values:
        with pytest.raises(RequestError, match=name) as caught:
            make(**{name: value})
        assert caught.value.param == name, value


def test_numbers_of_numpy_become_pythons() -> None:
    values: dict[str, Any] = {
        "n": np.int64(2),
        "best_of": np.int32(3),
        "temperature": np.float32(0.5),
        "top_p": np.float64(0.25),
        "top_k": np.uint8(7),
        "seed": np.uint64(5),
        "max_tokens": np.int16(4),
        "logprobs": np.int8(1),
        "ignore_eos": np.True_,
    }
    params = SamplingParams(**values)
    for name, value in values.items():
        found = getattr(params, name)
        assert found == value
        assert type(found) in (int, float, bool), name
    assert make_beams(beam_width=np.int64(3), length_penalty=np.float32(2)).length_penalty == 2.0


@pytest.mark.parametrize(
    "ids", [[1, 2], (1, 2), {1, 2}, range(1, 3), np.array([1, 2]), [np.int64(1), np.uint8(2)]]
)
def test_lists_of_stop_token_ids(ids: Any) -> None:
    for params in (SamplingParams(stop_token_ids=ids), make_beams(stop_token_ids=ids)):
        assert params.stop_token_ids == (1, 2)
        assert {type(each) for each in params.stop_token_ids or ()} == {int}


def test_stop_strings_are_one_or_several() -> None:
    for stop in ("a", ["a"], ("a",), {"a"}):
        assert SamplingParams(stop=stop).stop == ("a",)  # pyright: ignore
    assert make_beams(stop=None).stop == SamplingParams(stop=[]).stop == ()


def test_seed_minus_1_asks_for_one() -> None:
    """O-74: exactly that value; all others in the range are seeds."""
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=np.int64(-1)).seed is None
    for seed in (-2, 0, 1, MAX_SEED, -MAX_SEED - 1):
        assert SamplingParams(seed=seed).seed == seed
