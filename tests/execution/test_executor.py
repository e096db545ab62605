"""Calls of the devices: who carries out the same ones comes to the same state."""

import gc

import numpy as np

from jpaged import SamplingParams
from jpaged.execution.executor import Executor
from tests.random_llama import save_random_llama


def test_another_executor_can_follow(tmp_path, make_llm):
    """Under swapping, copy-on-write and sampling; what nobody needs any more is forgotten."""
    llm = make_llm(
        save_random_llama(tmp_path),
        num_gpu_blocks_override=14,
        preemption_mode="swap",
        swap_space=0.01,
    )
    runner = llm.engine.core._runner
    follower, calls = Executor(runner.spec, runner.executor.programs), []

    def follow(call):
        calls.append(type(call).__name__)
        follower.run(call)

    runner._send = follow
    prompts = [{"prompt_token_ids": [number] * 37} for number in range(5)]
    params = SamplingParams(n=2, temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
    for _ in range(2):  # the second time, with prefixes from the cache
        llm.generate(prompts, params, use_tqdm=False)
    assert {*calls} == {"StepCall", "SwapOutCall", "SwapInCall", "ForgetCall"}
    gc.collect()
    llm.generate(prompts[:1], SamplingParams(max_tokens=1), use_tqdm=False)
    assert not follower.swapped and not runner.executor.swapped
    own = runner.executor
    for mine, other in zip(
        (*own.pools, *own.state), (*follower.pools, *follower.state), strict=True
    ):
        np.testing.assert_array_equal(mine, other)
