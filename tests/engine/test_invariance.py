"""An answer is the same with the cache on or off, whole or in chunks, with memory to spare or
preempted, alone or among others, one of one or one of three: token ids are equal, log-probabilities
within 1e-4 in float32."""

import itertools
import re

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from tests.random_llama import save_random_llama

NUM_TOKENS = 40
KINDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 11},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("random"))


def prompt_of(length: int, first: int) -> dict:
    return {"prompt_token_ids": [(first + 7 * index) % 200 for index in range(length)]}


TARGET = prompt_of(75, first=3)
# Some begin like the target.
OTHERS = [prompt_of(20 + 9 * number, first=3 if number % 2 else number) for number in range(8)]


def params(kind: str, n: int) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, **KINDS[kind])


def first_answer(llm, kind: str, n: int, *, is_alone: bool):
    """Twice, so that the second one may find the first one's blocks."""
    target = (TARGET, params(kind, n))
    others = [] if is_alone else [(other, params(kind, 1)) for other in OTHERS]
    work = [*others[:4], target, *others[4:], target]
    outputs = llm.generate([prompt for prompt, _ in work], [each for _, each in work])
    llm.engine.scheduler.check_integrity()
    assert llm.engine.block_pool.num_used == 0
    positions = (len(others[:4]), len(work) - 1)
    return [outputs[position].outputs[0] for position in positions]


def preemptions(llm) -> list[float]:
    """All so far, and those that moved blocks to host memory."""
    rendered = llm.engine.metrics.render()[0].decode()
    return [
        float(re.search(rf"^jpaged:{name}_total{{.*}} (.*)$", rendered, re.M)[1])
        for name in ("num_preemptions", "num_swap_outs")
    ]


@pytest.fixture(scope="module")
def expected(folder, make_llm):
    """Computed whole, without cache or pressure."""
    llm = make_llm(folder, enable_prefix_caching=False, max_num_batched_tokens=128)
    return {kind: first_answer(llm, kind, 1, is_alone=True)[0] for kind in KINDS}


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    "budget",
    [16, pytest.param(64, marks=pytest.mark.long), pytest.param(128, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("memory", ["roomy", "recompute", "swap"])
def test_answers_never_change(folder, make_llm, expected, cache, budget, memory):
    pressure = {"num_gpu_blocks_override": 14, "preemption_mode": memory}
    llm = make_llm(
        folder,
        enable_prefix_caching=cache,
        max_num_batched_tokens=budget,
        **({} if memory == "roomy" else pressure),
    )
    before = preemptions(llm)
    for kind, is_alone, n in itertools.product(KINDS, (True, False), (1, 3)):
        for answer in first_answer(llm, kind, n, is_alone=is_alone):
            case = f"{kind} {is_alone=} {n=}"
            assert answer.token_ids == expected[kind].token_ids, case
            got, wanted = (
                np.array([[each.logprob, *(logprob for _, logprob in each.top)] for each in side])
                for side in (answer.logprobs, expected[kind].logprobs)
            )
            np.testing.assert_allclose(got, wanted, atol=1e-4, err_msg=case)
    num_preemptions, num_swaps = (
        now - old for now, old in zip(preemptions(llm), before, strict=True)
    )
    assert (num_preemptions > 20) == (memory != "roomy")
    assert (num_swaps > 20) == (memory == "swap")
