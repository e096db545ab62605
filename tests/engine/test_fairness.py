"""What one request may cost the others: slots, blocks, and the scheduler's time."""

from collections import Counter
from dataclasses import replace

import pytest

from jpaged.beam_search_params import BeamSearchParams
from jpaged.errors import RequestError
from jpaged.scheduling import prefix_cache
from jpaged.scheduling.holdings import Holdings
from tests.engine.scripted_runner import ScriptedRunner
from tests.engine.test_engine_machine import expected_beams, make_engine
from tests.engine.test_scripted_engine import PROMPT, added, assert_answered, run, sampling


def test_many_answers_do_not_block_the_line():
    """A request for as many answers as there are slots, behind a long one."""
    runner = ScriptedRunner(num_blocks=400, block_size=4, num_slots=8, max_num_tokens=32)
    engine = make_engine(runner)
    long = added(engine, [1, 2], sampling(45))
    many = added(engine, PROMPT, sampling(3, n=8))
    short = [added(engine, [3, index % 7], sampling(3)) for index in range(20)]
    while not (many.is_finished and all(each.is_finished for each in short)):
        engine.step()
        assert not long.is_finished, "they waited for the long one"
    run(engine)
    assert_answered(many, PROMPT)
    for index, each in enumerate(short):
        assert_answered(each, [3, index % 7])


def test_answers_that_start_late_share_the_prompt():
    """Eight answers on six slots: the prompt's full blocks exist once."""
    runner = ScriptedRunner(num_blocks=60, block_size=4, num_slots=6, max_num_tokens=32)
    engine = make_engine(runner, cache=False)
    generation = added(engine, PROMPT, sampling(6, n=6))
    other = added(engine, [4, 4], sampling(12))
    while not other.is_finished:
        engine.step()
        tables = [each.block_ids for each in generation.group.requests if each.block_ids]
        assert len({tuple(table[:2]) for table in tables}) <= 1
    run(engine)
    assert_answered(generation, PROMPT)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("num_blocks,length,width", [(18, 34, 3), (20, 25, 4), (14, 21, 2)])
def test_preempted_beams_find_what_they_find_alone(num_blocks, length, width, cache, mode):
    """O-93: a search that fits the pool alone is complete after a preemption, too."""
    prompt = [(3 * index + index // 5) % 7 for index in range(length)]
    params = BeamSearchParams(beam_width=width, max_tokens=12, ignore_eos=True)

    def answer(*others):
        runner = ScriptedRunner(
            num_blocks=num_blocks,
            block_size=4,
            num_slots=8,
            max_num_tokens=64,
            num_swap=40 if mode == "swap" else 0,
        )
        engine = make_engine(runner, cache=cache, mode=mode)
        earlier = [added(engine, each, sampling(24)) for each in others]
        generation = added(engine, prompt, params)
        run(engine)
        for each, own in zip(earlier, others, strict=True):
            assert_answered(each, own)
        preempted = sum(request.num_preemptions for request in generation.group.requests)
        return generation.output().outputs, preempted

    expected, _ = answer()
    assert all(len(each.token_ids) == 12 for each in expected)
    preempted = 0
    for size in range(1, 24, 2):
        outputs, count = answer([(5 * index) % 7 for index in range(size)])
        assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]
        preempted += count
    assert preempted > 0, "no pool was too small for both"


def test_a_fork_of_a_request_that_is_computed_again():
    """The parent writes its blocks anew, so the child waits for them."""
    runner = ScriptedRunner(num_blocks=14, block_size=4, num_slots=4, max_num_tokens=8)
    engine = make_engine(runner, cache=False, mode="recompute")
    first = added(engine, PROMPT, sampling(30))
    second = added(engine, [5, 5, 1], sampling(30))
    forked = False
    while engine.has_unfinished:
        engine.step()
        request = second.group.requests[0]
        is_recomputed = request.num_preemptions and request.slot is not None
        if is_recomputed and not forked and not request.is_finished:
            engine.fork(second, 0, seed=3)
            forked = True
    assert forked
    assert_answered(first, PROMPT)
    tokens = [each.token_ids for each in second.output().outputs]
    assert len(tokens) == 2 and tokens[0] == tokens[1]


def test_a_blocked_request_is_not_looked_at_in_every_step(monkeypatch):
    """Neither its blocks in the prefix cache nor its salt are hashed again while it waits."""
    calls = Counter()
    for name in ("root_digest", "block_digest"):
        function = getattr(prefix_cache, name)
        counted = lambda *given, name=name, function=function: (  # noqa: E731
            calls.update([name]) or function(*given)
        )
        monkeypatch.setattr(prefix_cache, name, counted)
    matches = Counter()
    match = prefix_cache.PrefixCache.match
    monkeypatch.setattr(
        prefix_cache.PrefixCache,
        "match",
        lambda self, request: matches.update([request]) or match(self, request),
    )
    runner = ScriptedRunner(num_blocks=12, block_size=4, num_slots=4, max_num_tokens=64)
    engine = make_engine(runner)
    added(engine, PROMPT, sampling(36))
    blocked = added(engine, [6] * 40, sampling(2), cache_salt="salt")
    for _ in range(30):
        engine.step()
    [request] = blocked.group.requests
    assert request.first_scheduled_time is None, "it should wait for blocks"
    assert matches[request] == 1
    run(engine)
    assert calls["root_digest"] == 2  # once a request


def test_blocked_siblings_in_host_memory_are_not_looked_at_in_every_step(monkeypatch):
    """Neither what they find in the prefix cache nor what they share with each other."""
    matches = Counter()
    match = Holdings.match
    monkeypatch.setattr(
        Holdings, "match", lambda self, request: matches.update(["match"]) or match(self, request)
    )
    runner = ScriptedRunner(
        num_blocks=16, block_size=4, num_slots=4, max_num_tokens=64, num_swap=40
    )
    engine = make_engine(runner, mode="swap")
    first = added(engine, PROMPT, sampling(36))
    generation = added(engine, [5, *PROMPT], sampling(30, n=3, temperature=1.0))
    while not engine.core.scheduler.num_swapped:
        engine.step()
    before, num_blocked = matches.total(), 0
    while not first.is_finished:
        assert engine.core.scheduler.num_swapped == 3
        engine.step()
        num_blocked += 1
    assert num_blocked >= 10, "they came back at once"
    assert matches.total() - before == 3
    run(engine)
    assert_answered(first, PROMPT)
    assert_answered(generation, [5, *PROMPT])


def test_waiting_requests_leave_in_any_order_at_once():
    """Ending one that waits does not search the queue."""
    runner = ScriptedRunner(num_blocks=60, block_size=4, num_slots=2, max_num_tokens=32)
    engine = make_engine(runner)
    groups = [added(engine, [1, index % 7], sampling(2)) for index in range(2000)]
    compared = Counter()
    kind = type(groups[0].group.requests[0])
    kind.__eq__ = lambda self, other: compared.update(["=="]) or self is other
    try:
        for generation in groups[::-2]:
            engine.abort(generation)
    finally:
        del kind.__eq__
    assert compared["=="] < 10 * len(groups)
    run(engine)


@pytest.mark.parametrize("length", [5, 7, 8, 9])
@pytest.mark.parametrize("width", [1, 3, 4])
def test_beams_that_can_never_run_together_are_refused(length, width):
    """One block less than for a beam's first token each; with as many, tokens are computed."""
    prompt = [(3 * index) % 7 for index in range(length)]
    needed = length // 4 + width

    def engine_with(num_blocks):
        runner = ScriptedRunner(num_blocks=num_blocks, block_size=4, num_slots=4, max_num_tokens=64)
        return make_engine(runner)

    params = BeamSearchParams(beam_width=width, max_tokens=9, ignore_eos=True)
    engine = engine_with(needed)
    generation = added(engine, prompt, params)
    run(engine)
    assert all(len(each.token_ids) > 1 for each in generation.output().outputs)
    engine = engine_with(needed - 1)
    message = (
        rf"beam_width {width} needs at least {needed} KV blocks .* whole pool has {needed - 1}\. "
        "Choose a smaller beam_width"
    )
    if length <= 4 * (needed - 1):
        with pytest.raises(RequestError, match=message) as error:
            added(engine, prompt, params)
        assert error.value.param == "beam_width"
        generation = added(engine, prompt, replace(params, max_tokens=1))
        run(engine)
        assert len(generation.output().outputs) == width


def test_a_search_starts_with_all_its_beams():
    """Four beams on four slots, one of which is taken: others use the slots meanwhile."""
    runner = ScriptedRunner(num_blocks=100, block_size=4, num_slots=4, max_num_tokens=32)
    engine = make_engine(runner)
    long = added(engine, [1, 2], sampling(40))
    params = BeamSearchParams(beam_width=4, max_tokens=8, ignore_eos=True)
    search = added(engine, PROMPT, params)
    short = [added(engine, [3, index], sampling(3)) for index in range(4)]
    while not search.is_finished:
        engine.step()
        slots = {each.slot for each in search.group.requests}
        assert slots == {None} or long.is_finished
        assert not long.is_finished or all(each.is_finished for each in short)
    answers = [(each.token_ids, each.score) for each in search.output().outputs]
    assert answers == expected_beams(PROMPT, params)
    for index, each in enumerate(short):
        assert_answered(each, [3, index])


@pytest.mark.parametrize("num_blocks,width", [(12, 3), (100, 4)], ids=["blocks", "slots"])
def test_a_search_is_not_overtaken_for_ever(num_blocks, width):
    """However many younger requests come, no more than there are slots start before it."""
    runner = ScriptedRunner(num_blocks=num_blocks, block_size=4, num_slots=4, max_num_tokens=32)
    engine = make_engine(runner, cache=False)
    added(engine, [1, 2] * 14, sampling(10))
    params = BeamSearchParams(beam_width=width, max_tokens=8, ignore_eos=True)
    search = added(engine, PROMPT, params)
    younger = []
    while not any(each.slot is not None for each in search.group.requests):
        assert len(younger) < 100, "it waits for ever"
        younger.append(added(engine, [3, len(younger) % 7], sampling(4 + len(younger) % 3)))
        engine.step()
    started = [each for each in younger if each.group.requests[0].first_scheduled_time is not None]
    assert 0 < len(started) <= 4
    run(engine)
    answers = [(each.token_ids, each.score) for each in search.output().outputs]
    assert answers == expected_beams(PROMPT, params)


def test_a_search_does_not_overtake_another():
    """Were both begun and short of slots for the rest, neither could go on."""
    runner = ScriptedRunner(num_blocks=100, block_size=4, num_slots=4, max_num_tokens=32)
    engine = make_engine(runner)
    added(engine, [1, 2], sampling(20))
    widths = (4, 2)
    searches = [
        added(engine, PROMPT, BeamSearchParams(beam_width=width, max_tokens=4)) for width in widths
    ]
    run(engine)
    first, second = (each.output().timing.first_scheduled for each in searches)
    assert first < second


@pytest.mark.parametrize("budget,num_prompt_logprobs", [(6, None), (19, 2)])
def test_beams_of_a_begun_search_do_not_wait_for_an_older_request(budget, num_prompt_logprobs):
    """Forks took the slots of two beams, and were swapped out while the prompt was computed.

    They are older than the search, so first in the queue, and wait for the blocks of its beam.
    """
    runner = ScriptedRunner(
        num_blocks=8, block_size=4, num_slots=5, max_num_tokens=budget, num_swap=100
    )
    engine = make_engine(runner, mode="swap")
    older = added(engine, [0], sampling(7, n=2, temperature=1.0))
    engine.step()
    params = BeamSearchParams(beam_width=3, max_tokens=2, prompt_logprobs=num_prompt_logprobs)
    search = added(engine, PROMPT[1:7], params)
    engine.step()
    for index in range(2):
        engine.fork(older, index, seed=index)
    most_swapped = 0
    while engine.has_unfinished:
        engine.step()
        most_swapped = max(most_swapped, engine.core.scheduler.num_swapped)
    assert most_swapped == 4
    assert search.output().timing.finished < older.output().timing.finished
    answers = [(each.token_ids, each.score) for each in search.output().outputs]
    assert answers == expected_beams(PROMPT[1:7], params)
    assert [len(each.token_ids) for each in older.output().outputs] == [7] * 4
