"""Blocks that nobody may read hold NaN, on the real device: one that is read shows at once."""

import itertools

import jax.numpy as jnp
import pytest

from jpaged.beam_search_params import BeamSearchParams
from jpaged.sampling_params import SamplingParams
from tests.engine.poison import Poison
from tests.random_llama import save_random_llama

PROMPTS = [
    {"prompt_token_ids": [(first + 7 * index) % 200 for index in range(length)]}
    for first, length in [(3, 33), (3, 40), (5, 17), (3, 48), (8, 5), (5, 30)]
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1, prompt_logprobs=1),
    SamplingParams(n=3, seed=1, max_tokens=30, ignore_eos=True, logprobs=1),
    BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True, logprobs=1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("random"))


def answer_all(llm):
    groups = [
        llm.engine.make_request("r", prompt, params)
        for prompt, params in itertools.product(PROMPTS, PARAMS)
    ]
    for group in groups:
        llm.engine.add_request(group)
    while llm.engine.has_unfinished:
        llm.engine.step()
    return [
        [(each.token_ids, each.cumulative_logprob) for each in group.output().outputs]
        for group in groups
    ]


def poison(llm) -> None:
    """From now on. Everything that a new engine has is garbage."""
    runner, watch = llm.engine._runner, Poison(llm.engine.block_pool)
    runner._pools = tuple(jnp.full_like(pool, jnp.nan) for pool in runner._pools)
    move_blocks = runner.move_blocks

    def poisoning_move_blocks(batch):
        if batch.swap_outs:
            move_blocks(batch)
        blocks = jnp.asarray(watch.unreadable(batch), jnp.int32)
        runner._pools = tuple(pool.at[blocks].set(jnp.nan) for pool in runner._pools)
        if not batch.swap_outs:
            move_blocks(batch)

    runner.move_blocks = poisoning_move_blocks


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_nobody_reads_what_is_not_written(folder, make_llm, mode):
    """O-01, O-03, O-07: samples, beams, copies of parts, preemption, all in one pool."""
    expected = answer_all(make_llm(folder))
    # max_model_len makes it an engine that no other test gets.
    llm = make_llm(folder, num_gpu_blocks_override=18, preemption_mode=mode, max_model_len=96)
    poison(llm)
    for got, wanted in zip(answer_all(llm), expected, strict=True):
        assert [token_ids for token_ids, _ in got] == [token_ids for token_ids, _ in wanted]
        for (_, one), (_, other) in zip(got, wanted, strict=True):
            assert one == pytest.approx(other, abs=1e-3)
