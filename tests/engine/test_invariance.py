"""An answer is the same with the cache on or off, whole or in chunks, with memory to spare or
preempted, alone or among others: token ids are equal, log-probabilities within 1e-4 in float32.

Each engine answers requests of all kinds. In some of them, blocks that nobody may read hold NaN.
"""

import re
from dataclasses import dataclass
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.beam_search_params import BeamSearchParams
from jpaged.sampling_params import SamplingParams
from tests.engine.poison import Poison
from tests.random_llama import save_random_llama

# In one byte, a number that lies between two steps is rounded either way.
TOLERANCES = {"auto": 1e-4, "int8": 3e-2}
# No other test has engines with this limit: those here may be poisoned.
OPTIONS = {"max_model_len": 128, "max_num_seqs": 8}


@dataclass(frozen=True)
class Kind:
    """A kind of request: its parameters, and where its prompt begins and ends."""

    params: SamplingParams | BeamSearchParams
    length: int
    first: int = 3

    @property
    def prompt(self) -> dict[str, list[int]]:
        return {
            "prompt_token_ids": [(self.first + 7 * index) % 200 for index in range(self.length)]
        }


def sampled(**options) -> SamplingParams:
    return SamplingParams(**{"ignore_eos": True, "logprobs": 2, "max_tokens": 20, **options})


# Most prompts begin alike; some end at the end of a block.
KINDS = {
    "greedy": Kind(sampled(temperature=0, max_tokens=40), 75),
    "seeded": Kind(sampled(temperature=0.9, top_p=0.95, top_k=40, seed=11, max_tokens=40), 64),
    "more answers than rows": Kind(sampled(n=10, seed=7), 19),
    "best_of": Kind(sampled(n=2, best_of=4, seed=3, prompt_logprobs=2, max_tokens=40), 48),
    "beams": Kind(
        BeamSearchParams(
            beam_width=3, max_tokens=20, ignore_eos=True, logprobs=1, prompt_logprobs=1
        ),
        40,
    ),
    "beams of another prompt": Kind(
        BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True), 32, first=5
    ),
    "prompt's log-probabilities": Kind(SamplingParams(max_tokens=0, prompt_logprobs=2), 60),
    "answer and prompt's": Kind(
        sampled(temperature=0, prompt_logprobs=1, max_tokens=40), 33, first=5
    ),
    "one token": Kind(sampled(temperature=0, max_tokens=40), 1, first=9),
}


@dataclass(frozen=True)
class Answer:
    """All that must never change: token ids of each answer, and every log-probability."""

    token_ids: list[tuple[int, ...]]
    logprobs: np.ndarray


def answer_of(output) -> Answer:
    entries = [entry for entry in output.prompt_logprobs or () if entry is not None]
    for each in output.outputs:
        entries += each.logprobs or ()
    values = [lp for entry in entries for lp in (entry.logprob, *(lp for _, lp in entry.top))]
    values += [each.score for each in output.outputs if each.score is not None]
    return Answer([each.token_ids for each in output.outputs], np.array(values))


def answer_all(llm, names) -> list[Answer]:
    """Of requests that are all there from the beginning."""
    engine = llm.engine
    generations = [
        engine.make_request(name, KINDS[name].prompt, KINDS[name].params) for name in names
    ]
    for generation in generations:
        engine.add_request(generation)
    while engine.has_unfinished:
        for generation in engine.step():
            output = generation.output()
            has_begun = any(each.token_ids for each in output.outputs)
            if generation.params.prompt_logprobs is not None and has_begun:
                assert output.prompt_logprobs is not None, "an answer before its prompt's scores"
    engine.core.scheduler.check_integrity()
    assert engine.core.block_pool.num_used == 0
    return [answer_of(generation.output()) for generation in generations]


def assert_equal(got: Answer, expected: Answer, case: str, *, tolerance: float) -> None:
    assert got.token_ids == expected.token_ids, case
    np.testing.assert_allclose(
        got.logprobs, expected.logprobs, rtol=0, atol=tolerance, err_msg=case
    )


def poison(llm) -> None:
    """From now on. Everything that a new engine has is garbage."""
    runner, watch = llm.engine.core._runner, Poison(llm.engine.core.block_pool)
    runner.executor.pools = tuple(jnp.full_like(pool, jnp.nan) for pool in runner.executor.pools)
    move_blocks = runner.move_blocks

    def poisoning_move_blocks(batch):
        if batch.swap_outs:
            move_blocks(batch)
        blocks = jnp.asarray(watch.unreadable(batch), jnp.int32)
        runner.executor.pools = tuple(
            pool.at[blocks].set(jnp.nan) for pool in runner.executor.pools
        )
        if not batch.swap_outs:
            move_blocks(batch)

    runner.move_blocks = poisoning_move_blocks


def preemptions(llm) -> np.ndarray:
    """All so far, and those that moved blocks to host memory."""
    rendered = llm.engine.core.metrics.render()[0].decode()
    names = ("num_preemptions", "num_swap_outs")
    found = [re.search(rf"^jpaged:{name}_total{{.*}} (.*)$", rendered, re.M) for name in names]
    return np.array([float(match[1]) for match in found if match])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def expected(folder, make_llm):
    """By type of the KV cache: each request alone, computed whole, without cache or pressure."""

    @cache
    def answers(kv_cache_dtype: str) -> dict[str, Answer]:
        llm = make_llm(
            folder,
            enable_prefix_caching=False,
            max_num_batched_tokens=128,
            kv_cache_dtype=kv_cache_dtype,
            **OPTIONS,
        )
        return {name: answer_all(llm, [name])[0] for name in KINDS}

    return answers


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", TOLERANCES)
def test_a_request_alone_has_all_its_tokens(expected, kv_cache_dtype):
    for name, answer in expected(kv_cache_dtype).items():
        lengths = [len(token_ids) for token_ids in answer.token_ids]
        params = KINDS[name].params
        assert lengths == [params.max_tokens] * len(lengths), name
        assert np.isfinite(answer.logprobs).all(), name


@pytest.mark.parametrize(
    "cache,memory,budget,kv_cache_dtype,is_poisoned",
    [
        (True, "roomy", 16, "auto", False),
        (False, "roomy", 64, "auto", False),
        (True, "recompute", 16, "auto", True),
        (False, "recompute", 64, "auto", False),
        (True, "swap", 16, "auto", True),
        (False, "swap", 64, "auto", False),
        (True, "recompute", 16, "int8", False),
        (True, "swap", 64, "int8", False),
    ],
)
def test_answers_never_change(
    folder, make_llm, expected, cache, memory, budget, kv_cache_dtype, is_poisoned
):
    """O-01, O-03, O-07, O-11, O-13, O-14, O-15: seeds, samples, beams, scores, copies of parts of
    blocks, all in one pool."""
    pressure = {"num_gpu_blocks_override": 12, "preemption_mode": memory}
    llm = make_llm(
        folder,
        enable_prefix_caching=cache,
        max_num_batched_tokens=budget,
        kv_cache_dtype=kv_cache_dtype,
        **OPTIONS,
        **({} if memory == "roomy" else pressure),
    )
    if is_poisoned:
        poison(llm)
    wanted, tolerance = expected(kv_cache_dtype), TOLERANCES[kv_cache_dtype]
    before = preemptions(llm)
    # Twice, so that the second ones may find the first ones' blocks.
    names = [*KINDS, *reversed(KINDS)]
    for name, answer in zip(names, answer_all(llm, names), strict=True):
        assert_equal(answer, wanted[name], f"{name}, among others", tolerance=tolerance)
    num_preempted, num_swapped = preemptions(llm) - before
    assert (num_preempted > 5) == (memory != "roomy"), num_preempted
    assert (num_swapped > 0) == (memory == "swap")
    for name in KINDS:
        assert_equal(
            answer_all(llm, [name])[0], wanted[name], f"{name}, alone", tolerance=tolerance
        )
