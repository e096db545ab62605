"""The scheduler with a device that answers one step late, as the engine's does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.errors import RequestError
from jpaged.outputs import FinishReason
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.block_pool import BlockPool
from jpaged.scheduling.prefill_clock import PrefillClock
from jpaged.scheduling.request import Request
from jpaged.scheduling.request_group import RequestGroup
from jpaged.scheduling.scheduled_batch import ScheduledBatch
from jpaged.scheduling.scheduler import Scheduler
from jpaged.scheduling.swap import PreemptionCosts, SwapSpace

STOP_TOKEN = 7


def make_group(name: str, num_prompt_tokens: int, max_tokens: int, count: int) -> list[Request]:
    """Several answers to one prompt."""
    requests = [
        Request(
            name,
            list(range(100, 100 + num_prompt_tokens)),
            SamplingParams(max_tokens=max_tokens),
            max_tokens=max_tokens,
            stop_token_ids=frozenset({STOP_TOKEN}),
        )
        for _ in range(count)
    ]
    return RequestGroup(0, requests).requests


def make_request(name: str, num_prompt_tokens: int, max_tokens: int) -> Request:
    [request] = make_group(name, num_prompt_tokens, max_tokens, 1)
    return request


class Simulation:
    """Runs steps as the engine does: step n + 1 is scheduled before the tokens of n are read.

    `stops_after[name]`: number of tokens after which the device samples the stop token.
    """

    def __init__(
        self,
        *,
        num_blocks,
        block_size=4,
        max_num_seqs=3,
        budget=8,
        stops_after=None,
        cache=False,
        num_swap_blocks=0,
    ):
        costs = PreemptionCosts(swap_seconds=1.0, prefill_clock=PrefillClock())
        self.scheduler = Scheduler(
            BlockPool(num_blocks),
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=cache,
            swap_space=SwapSpace(num_swap_blocks, mode="swap", costs=costs),
        )
        self.block_size, self.budget, self.max_num_seqs = block_size, budget, max_num_seqs
        self.stops_after = stops_after or {}
        self.in_flight: list[Request] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_swapped = 0

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self.check(batch)
        sampled = batch.sampled
        for request in self.in_flight:
            if not request.is_finished:
                self.read_token(request)
        self.in_flight = sampled
        self.num_steps += 1
        self.num_preemptions += len(batch.preempted)
        self.num_swapped += sum(len(out.swapped.tables) for out in batch.swap_outs)
        self.scheduler.check_integrity()
        return batch

    def read_token(self, request: Request) -> None:
        is_last = request.num_output_tokens + 1 >= self.stops_after.get(request.request_id, 10**9)
        request.append_token(STOP_TOKEN if is_last else 1)
        if request.is_finished:
            self.scheduler.retire(request)

    def run(self, max_steps: int = 10_000) -> None:
        while self.scheduler.has_requests or self.in_flight:
            assert self.num_steps < max_steps, "no progress"
            self.step()

    def check(self, batch: ScheduledBatch) -> None:
        rows = batch.rows
        assert batch.num_tokens == sum(row.num_tokens for row in rows) <= self.budget
        assert len(rows) <= self.max_num_seqs
        assert len({row.request.slot for row in rows}) == len(rows)
        assert all(row.num_tokens == 1 for row in batch.decodes)
        pool = self.scheduler.block_pool
        for row in batch.decodes:
            # O-03: nobody writes to a block that another one holds too.
            block = row.request.block_ids[row.start // self.block_size]
            assert pool.reference_count(block) == 1
        assert len(batch.copies) <= self.max_num_seqs
        targets = [target for _, target in batch.copies]
        assert len(set(targets)) == len(targets), "which copy wins is undefined"
        assert not (batch.swap_ins and batch.swap_outs)
        for row in rows:
            end = row.start + row.num_tokens
            assert row.request.num_computed_tokens == end
            assert len(row.request.block_ids) * self.block_size >= end, "a token without a slot"
            # Only the last token that is known, on the host or on the device, yields another.
            assert row.is_sampled == (end == row.request.num_tokens - row.is_sampled)


# Prompt length, max_tokens, tokens until the stop token, step of arrival, number of answers.
REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 20),
        st.integers(1, 20),
        st.integers(1, 25),
        st.integers(0, 6),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(5, 14),
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(4, 24),
    abort_at=st.dictionaries(st.integers(0, 40), st.integers(0, 11), max_size=3),
    cache=st.booleans(),
    num_swap_blocks=st.sampled_from([0, 4, 100]),
)
def test_every_request_ends_as_it_should(
    requests, num_blocks, max_num_seqs, budget, abort_at, cache, num_swap_blocks
):
    """O-04, O-14: under pressure, with stops and aborts, all end with exactly their tokens."""
    stops = {str(number): stop for number, (_, _, stop, _, _) in enumerate(requests)}
    simulation = Simulation(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=budget,
        stops_after=stops,
        cache=cache,
        num_swap_blocks=num_swap_blocks,
    )
    made = [
        make_group(str(number), prompt, out, count)
        for number, (prompt, out, _, _, count) in enumerate(requests)
    ]
    arrivals = sorted(range(len(made)), key=lambda number: requests[number][3])
    aborted = set()
    while arrivals or simulation.scheduler.has_requests or simulation.in_flight:
        while arrivals and requests[arrivals[0]][3] <= simulation.num_steps:
            for request in made[arrivals.pop(0)]:
                simulation.scheduler.add(request)
        victim = abort_at.get(simulation.num_steps, len(made))
        if victim < len(made) and victim not in arrivals:
            # One of the answers only: the others go on without it.
            if not made[victim][0].is_finished:
                aborted.add(victim)
                simulation.scheduler.finish(made[victim][0], FinishReason.ABORT)
        simulation.step()
        assert simulation.num_steps < 5000, "no progress"
    capacity = num_blocks * simulation.block_size
    for number, (group, (prompt, out, stop, _, _)) in enumerate(zip(made, requests, strict=True)):
        # The last token needs no slot of its own.
        room = capacity - prompt + 1
        is_stopped = stop <= min(out, room)
        for request in group[1:] if number in aborted else group:
            assert request.num_output_tokens == min(out, stop, room)
            reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
            assert request.finish_reason == reason
        if number in aborted:
            assert group[0].finish_reason is FinishReason.ABORT
    assert simulation.scheduler.block_pool.num_used == 0
    assert simulation.scheduler.swap_space.num_used == 0


def test_first_come_first_served():
    """O-12: under pressure a long request is not overtaken again and again."""
    simulation = Simulation(num_blocks=8, max_num_seqs=2, budget=8)
    long = make_request("long", 8, 16)
    simulation.scheduler.add(long)
    for number in range(60):
        simulation.scheduler.add(make_request(f"short-{number}", 4, 4))
        if simulation.num_steps < 25:
            simulation.step()
    assert long.is_finished and long.num_output_tokens == 16
    assert long.num_preemptions == 0
    simulation.run()


def test_latest_arrival_is_preempted_and_comes_back_first():
    simulation = Simulation(num_blocks=9, max_num_seqs=3, budget=16)
    requests = [make_request(name, 5, 12) for name in "abc"]
    for request in requests:
        simulation.scheduler.add(request)
    simulation.run()
    assert requests[0].num_preemptions == 0
    assert requests[2].num_preemptions > 0
    finished = sorted(requests, key=lambda request: request.finished_time)
    assert [request.request_id for request in finished] == ["a", "b", "c"]
    # Without room kept for the running ones, it would be a preemption a step.
    assert simulation.num_preemptions <= 4


def test_preempted_requests_come_back_before_newcomers():
    """O-12: one that waits already, and would fit at once, stays behind."""
    simulation = Simulation(num_blocks=6, max_num_seqs=2, budget=16)
    first, preempted = (make_request(name, 5, 12) for name in "ab")
    newcomer = make_request("c", 1, 1)
    for request in (first, preempted, newcomer):
        simulation.scheduler.add(request)
    while not preempted.num_preemptions:
        simulation.step()
    assert list(simulation.scheduler.waiting) == [preempted, newcomer]
    simulation.run()


def test_prompt_larger_than_the_pool_is_refused_at_once():
    """O-09"""
    simulation = Simulation(num_blocks=5)
    with pytest.raises(RequestError, match="has 21 tokens and needs 6 KV blocks.*pool has 5"):
        simulation.scheduler.add(make_request("large", 21, 1))
    simulation.scheduler.add(make_request("small", 5, 3))
    simulation.run()


def test_answer_larger_than_the_pool_ends_by_length():
    """O-09: 20 slots hold 8 prompt tokens and 12 generated ones; one more needs none."""
    simulation = Simulation(num_blocks=5)
    request = make_request("grows", 8, 100)
    simulation.scheduler.add(request)
    simulation.run()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_output_tokens == 13


def test_decodes_go_first_and_prompts_fill_the_budget():
    simulation = Simulation(num_blocks=50, max_num_seqs=4, budget=10)
    simulation.scheduler.add(make_request("a", 3, 20))
    simulation.step()
    simulation.scheduler.add(make_request("b", 25, 5))
    sizes = []
    for _ in range(3):
        batch = simulation.step()
        assert [row.request.request_id for row in batch.decodes] == ["a"]
        sizes.append([row.num_tokens for row in batch.prefills])
    assert sizes == [[9], [9], [7]]
    assert len(simulation.step().decodes) == 2


def test_only_the_last_chunk_yields_a_token():
    """O-13"""
    simulation = Simulation(num_blocks=50, budget=8)
    simulation.scheduler.add(make_request("a", 20, 1))
    sampled = [[row.is_sampled for row in simulation.step().rows] for _ in range(3)]
    assert sampled == [[False], [False], [True]]


def test_a_prompt_is_computed_once_for_all_its_answers():
    """O-03, O-11: siblings share the prompt's blocks; the tail is copied on the first write."""
    simulation = Simulation(num_blocks=50, max_num_seqs=4, budget=32)
    group = make_group("a", 10, 6, count=3)
    for request in group:
        simulation.scheduler.add(request)
    batch = simulation.step()
    assert [(row.num_tokens, len(row.forks)) for row in batch.rows] == [(10, 2)]
    assert len({tuple(request.block_ids) for request in group}) == 1
    assert simulation.scheduler.block_pool.num_used == 3
    batch = simulation.step()
    assert len(batch.decodes) == 3 and len(batch.copies) == 2
    assert {source for source, _ in batch.copies} == {group[2].block_ids[2]}
    # Two blocks are shared by all, and each has a third one.
    assert simulation.scheduler.block_pool.num_used == 5
    assert [simulation.scheduler.block_pool.reference_count(b) for b in group[0].block_ids] == [
        3,
        3,
        1,
    ]
    simulation.run()
    assert all(request.num_output_tokens == 6 for request in group)


def test_a_full_tail_needs_no_copy():
    simulation = Simulation(num_blocks=50, max_num_seqs=4, budget=32)
    for request in make_group("a", 8, 6, count=3):
        simulation.scheduler.add(request)
    simulation.step()
    assert not simulation.step().copies


def test_more_answers_than_slots():
    """O-11: the rest start as slots come free."""
    simulation = Simulation(num_blocks=50, max_num_seqs=3, budget=32)
    group = make_group("a", 10, 5, count=8)
    for request in group:
        simulation.scheduler.add(request)
    simulation.run()
    assert all(request.num_output_tokens == 5 for request in group)


def test_siblings_are_preempted_together():
    simulation = Simulation(num_blocks=12, max_num_seqs=4, budget=32)
    first = make_request("first", 12, 24)
    group = make_group("group", 6, 20, count=3)
    for request in [first, *group]:
        simulation.scheduler.add(request)
    preempted = []
    while simulation.scheduler.has_requests or simulation.in_flight:
        batch = simulation.step()
        if batch.preempted and not preempted:
            preempted = batch.preempted
    assert {id(request) for request in preempted} == {id(request) for request in group}
    assert first.num_preemptions == 0
