"""Blocks of preempted requests in host memory: who goes there, and what comes back."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.outputs import FinishReason
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.prefill_clock import PrefillClock, StepTrace
from jpaged.scheduling.request import Request
from jpaged.scheduling.request_group import RequestGroup
from jpaged.scheduling.scheduler import Scheduler
from jpaged.scheduling.swap import PreemptionCosts, SwapSpace
from tests.random_llama import save_random_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("random"))


def make_group(num_prompt_tokens: int, max_tokens: int, count: int = 1) -> list[Request]:
    """Several answers to one prompt."""
    token_ids = list(range(num_prompt_tokens))
    requests = [
        Request("r", token_ids, SamplingParams(), max_tokens=max_tokens) for _ in range(count)
    ]
    return RequestGroup(0, requests).requests


def make_space(num_blocks: int, mode="swap", *, swap_seconds=1.0, prefill_seconds=None):
    clock = PrefillClock(seconds_per_token=prefill_seconds)
    return SwapSpace(num_blocks, mode=mode, costs=PreemptionCosts(swap_seconds, clock))


def run_step(scheduler: Scheduler):
    batch = scheduler.schedule()
    for request in batch.sampled:
        request.append_token(1)
        if request.is_finished:
            scheduler.retire(request)
    scheduler.check_integrity()
    return batch


@pytest.mark.parametrize(
    "prefill_seconds,num_tokens,num_blocks,swaps",
    [
        (None, 64, 4, False),  # nothing is known about prompts yet
        (0.1, 64, 4, True),  # 6.4 s to compute, 4 s to move
        (0.1, 39, 4, False),  # blocks that are hardly filled
        (0.05, 64, 4, False),
    ],
)
def test_the_cheaper_way_is_taken(prefill_seconds, num_tokens, num_blocks, swaps):
    work = {"num_tokens": num_tokens, "num_blocks": num_blocks}
    assert make_space(100, "auto", prefill_seconds=prefill_seconds).takes(**work) == swaps
    assert make_space(100, "swap").takes(**work)
    assert not make_space(100, "recompute", prefill_seconds=9.9).takes(**work)
    assert not make_space(3, "swap").takes(**work)


def test_the_prefill_clock_counts_chunks_with_the_result_behind_them():
    clock = PrefillClock()
    # One token for another request, which took a second and says nothing about prompts.
    clock.record(StepTrace(1, False, launched_at=10.0), has_result=True, now=11.0)
    assert clock.seconds_per_token is None
    # Two chunks of 50 tokens, the first without a result; the second ends 4 seconds later.
    clock.record(StepTrace(50, True, launched_at=11.0), has_result=False, now=11.1)
    assert clock.seconds_per_token is None
    clock.record(StepTrace(50, True, launched_at=11.1), has_result=True, now=15.0)
    assert clock.seconds_per_token == pytest.approx(0.04)
    # After a pause, time counts from the launch.
    clock.record(StepTrace(100, True, launched_at=99.0), has_result=True, now=101.0)
    assert clock.seconds_per_token == pytest.approx(0.04 - 0.2 * 0.02)


def scheduler_under_pressure(num_swap_blocks: int) -> Scheduler:
    return Scheduler(
        BlockPool(9),
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        swap_space=make_space(num_swap_blocks),
    )


def test_siblings_go_and_come_together_and_shared_blocks_once():
    scheduler = scheduler_under_pressure(100)
    [first], group = make_group(8, 16), make_group(8, 10, 2)
    for request in [first, *group]:
        scheduler.add(request)
    outs, ins = [], []
    while scheduler.has_requests:
        batch = run_step(scheduler)
        outs += batch.swap_outs
        ins += batch.swap_ins
        if batch.swap_outs:
            assert all(request.num_computed_tokens > 8 for request in group)
            [swapped] = {request.swapped for request in group}
            # Two blocks of the prompt that both share, and what each has written.
            assert swapped.num_blocks < sum(map(len, swapped.tables.values()))
            assert scheduler.swap_space.num_used == swapped.num_blocks
    assert len(outs) == len(ins) == 1 and outs[0].swapped is ins[0].swapped
    assert len(set(outs[0].blocks)) == len(outs[0].blocks) == len(ins[0].targets)
    assert first.num_preemptions == 0
    assert all(request.num_output_tokens == 10 for request in group)
    assert scheduler.swap_space.num_used == 0


def test_without_room_requests_are_computed_again():
    scheduler = scheduler_under_pressure(num_swap_blocks=1)
    requests = [request for _ in range(3) for request in make_group(8, 16)]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_requests:
        assert not run_step(scheduler).swap_outs
    assert sum(request.num_preemptions for request in requests) > 0


def test_aborting_a_swapped_request_frees_its_room():
    scheduler = scheduler_under_pressure(num_swap_blocks=100)
    requests = [request for _ in range(3) for request in make_group(8, 16)]
    for request in requests:
        scheduler.add(request)
    while not run_step(scheduler).swap_outs:
        pass
    [swapped] = [request for request in requests if request.swapped is not None]
    assert scheduler.num_swapped == 1 and scheduler.swap_space.num_used > 0
    scheduler.finish(swapped, FinishReason.ABORT)
    assert scheduler.num_swapped == 0 and scheduler.swap_space.num_used == 0
    while scheduler.has_requests:
        run_step(scheduler)


def test_blocks_come_back_as_they_went(folder, make_llm):
    """In chunks of every size; into other blocks, some of which nobody needs any more."""
    llm = make_llm(folder, preemption_mode="swap")
    runner = llm.engine.core._runner
    random = np.random.default_rng(0)
    before = tuple(
        jnp.asarray(random.standard_normal(pool.shape, np.float32))
        for pool in runner.executor.pools
    )
    mover, num_blocks = runner.executor.block_mover, 16 + 2 * 4 + 3
    sources = random.permutation(np.arange(1, 60))[:num_blocks].tolist()
    targets = random.permutation(np.arange(60, 120))[:num_blocks].tolist()
    targets = [target if index % 5 else None for index, target in enumerate(targets)]
    chunks = mover.fetch(before, sources)
    assert {chunk.values.sharding.memory_kind for chunk in chunks} == {"pinned_host"}
    assert [chunk.num_blocks for chunk in chunks] == [16, 4, 4, 1, 1, 1]
    moved = mover.put_back(tuple(pool.copy() for pool in before), chunks, targets)
    for old, new in zip(before, moved, strict=True):
        expected = np.array(old)
        for source, target in zip(sources, targets, strict=True):
            if target is not None:
                expected[target] = old[source]
        np.testing.assert_array_equal(new, expected)


def test_swapping_is_chosen_by_what_was_measured(folder, make_llm):
    """On this machine, too: a block of a tiny model is moved in microseconds or computed in
    milliseconds."""
    llm = make_llm(folder, num_gpu_blocks_override=14, swap_space=0.1)
    space = llm.engine.core.scheduler.swap_space
    assert space.num_blocks > 0 and space.costs.swap_seconds > 0
    prompts = [{"prompt_token_ids": [number] * 40} for number in range(6)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    measured = space.costs.prefill_clock.seconds_per_token
    assert measured is not None and measured > 0
    is_faster = 16 * measured > space.costs.swap_seconds
    assert space.takes(num_tokens=64, num_blocks=4) == is_faster


@pytest.mark.parametrize(
    "options,message",
    [
        ({"swap_space": -1}, "swap_space must be a number of GiB, 0 or more, got -1"),
        ({"swap_space": float("nan")}, "swap_space must be a finite number or None"),
        ({"swap_space": True}, "swap_space must be a finite number or None"),
        ({"swap_space": 0, "preemption_mode": "swap"}, "preemption_mode is swap, but swap_space"),
        ({"preemption_mode": "both"}, "preemption_mode must be one of auto, recompute, swap"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    "options,has_swap",
    [
        ({}, False),  # a CPU's pool is in that memory anyway
        ({"swap_space": 0}, False),
        ({"swap_space": 0.1}, True),
        ({"swap_space": 0.1, "preemption_mode": "recompute"}, False),
        ({"preemption_mode": "swap"}, True),
    ],
)
def test_programs_are_compiled_only_for_those_who_swap(folder, make_llm, options, has_swap):
    spec = make_llm(folder, **options).engine.core._runner.spec
    assert (spec.num_swap_blocks > 0) == has_swap
    assert spec.swap_chunks == ((16, 4, 1) if has_swap else ())
