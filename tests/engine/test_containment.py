"""One request's error ends that request alone; the engine and all other requests go on."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest

from jpaged.async_engine import AsyncEngine
from jpaged.beam_search_params import BeamSearchParams
from jpaged.config import EngineConfig
from jpaged.errors import EngineDeadError, JpagedError
from jpaged.generation import Generation
from jpaged.outputs import FinishReason, RequestOutput
from jpaged.sampling_params import SamplingParams
from jpaged.startup.load_engine import LoadedEngine
from tests.engine.scripted_runner import ScriptedRunner
from tests.engine.test_engine_machine import EOS, make_engine

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [[1, 0, 1, number] for number in range(4)]


@pytest.fixture
def engine():
    runner = ScriptedRunner(num_blocks=60, block_size=4, num_slots=8, max_num_tokens=32)
    return make_engine(runner)


@contextlib.asynccontextmanager
async def started(engine, monkeypatch) -> AsyncIterator[AsyncEngine]:
    """The asyncio front door of an engine, without a model."""
    loaded = LoadedEngine(engine.core, engine.inputs, "scripted", None, 48, sampling_defaults={})

    async def load(config: EngineConfig) -> LoadedEngine:
        return loaded

    monkeypatch.setattr("jpaged.async_engine.load_engine_in_thread", load)
    front = AsyncEngine(EngineConfig(model="scripted"))
    await front.start()
    try:
        yield front
    finally:
        await front.shutdown()


async def last_output(front: AsyncEngine, prompt: list[int], params) -> RequestOutput:
    outputs = [each async for each in front.generate({"prompt_token_ids": prompt}, params)]
    return outputs[-1]


def metric(engine, name: str, label: str = "") -> float:
    """A metric's value, summed over the samples that have the label."""
    lines = engine.metrics.render()[0].decode().splitlines()
    own = [line for line in lines if line.startswith(f"jpaged:{name}{{") and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in own)


def gauges(engine) -> list[float]:
    """Requests that run, requests that wait, and the share of the pool in use."""
    rendered = engine.core.metrics.render()[0].decode().splitlines()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return [
        float(line.rsplit(" ", 1)[1])
        for name in names
        for line in rendered
        if line.startswith(f"jpaged:{name}{{")
    ]


def raise_in_beams(monkeypatch) -> None:
    def fail(*_):
        raise OverflowError("a beam's score")

    monkeypatch.setattr("jpaged.scheduling.beam_search.BeamSearch.advance", fail)


def test_an_error_of_one_search_ends_it_alone(engine, monkeypatch, caplog):
    """Answers beside it are those that they get alone, all blocks come back, and the log has the
    traceback."""

    async def run() -> list[RequestOutput]:
        async with started(engine, monkeypatch) as front:
            alone = [await last_output(front, prompt, GREEDY) for prompt in PROMPTS]
            raise_in_beams(monkeypatch)
            beams = BeamSearchParams(beam_width=3, max_tokens=8)
            work = [last_output(front, PROMPTS[0], beams)]
            work += [last_output(front, prompt, GREEDY) for prompt in PROMPTS]
            failed, *others = await asyncio.gather(*work)
            front.check_health()
            assert {each.finish_reason for each in failed.outputs} == {FinishReason.ERROR}
            for before, after in zip(alone, others, strict=True):
                assert after.outputs[0].token_ids == before.outputs[0].token_ids
            return [await last_output(front, prompt, GREEDY) for prompt in PROMPTS]

    with caplog.at_level(logging.ERROR):
        assert all(each.finished for each in asyncio.run(run()))
    assert "OverflowError: a beam's score" in caplog.text
    assert engine.core.block_pool.num_used == 0 and not engine.has_unfinished


def test_an_error_that_breaks_the_books_stops_the_engine(engine, monkeypatch):
    """Who else reads a block that was lost cannot be told."""

    def lose_a_block(*_):
        engine.core.block_pool.allocate(1)
        raise OverflowError

    monkeypatch.setattr("jpaged.scheduling.beam_search.BeamSearch.advance", lose_a_block)

    async def run() -> None:
        async with started(engine, monkeypatch) as front:
            with pytest.raises(EngineDeadError):
                await last_output(front, PROMPTS[0], BeamSearchParams(beam_width=2))
            with pytest.raises(EngineDeadError):
                front.check_health()

    asyncio.run(run())


@pytest.mark.parametrize("num_steps", range(7))
def test_gauges_after_an_abort_that_no_step_follows(engine, num_steps):
    """O-91"""
    prompt = {"prompt_token_ids": PROMPTS[0]}
    generation = engine.make_request("r", prompt, BeamSearchParams(beam_width=4, max_tokens=20))
    engine.add_request(generation)
    for _ in range(num_steps):
        engine.step()
    engine.abort(generation)
    while engine.has_unfinished:
        engine.step()
    assert gauges(engine) == [0, 0, 0]


def test_a_dead_engine_serves_nothing_and_ends_at_once(engine, monkeypatch):
    """O-91, O-92: an error of the scheduler is nobody's fault alone. Requests end with it, gauges
    are 0, and nobody waits for actions that no thread takes any more."""

    async def run() -> None:
        async with started(engine, monkeypatch) as front:
            alone = await last_output(front, PROMPTS[0], GREEDY)
            assert alone.finished
            schedule = engine.core.scheduler.schedule

            def fail_later():
                if engine.core.scheduler.running:
                    raise ValueError("no order")
                return schedule()

            engine.core.scheduler.schedule = fail_later
            work = [last_output(front, prompt, GREEDY) for prompt in PROMPTS[:3]]
            results = await asyncio.gather(*work, return_exceptions=True)
            assert all(isinstance(each, EngineDeadError) for each in results)
            assert gauges(engine) == [0, 0, 0]
            with pytest.raises(EngineDeadError):
                await last_output(front, PROMPTS[0], GREEDY)
            assert not front._actions.empty(), "aborts that nobody carries out"

            def refuse_to_wait(_):
                raise AssertionError("waits for a dead engine")

            with monkeypatch.context() as patched:
                patched.setattr(asyncio, "sleep", refuse_to_wait)
                await front.drain(60)

    asyncio.run(run())


def test_an_output_that_cannot_be_made_ends_one_request(engine, monkeypatch):
    """For the client that reads it; the engine and all others go on."""
    output = Generation.output

    def failing(generation):
        if generation.prompt_token_ids == tuple(PROMPTS[0]):
            raise ValueError("no such answer")
        return output(generation)

    async def run() -> None:
        async with started(engine, monkeypatch) as front:
            monkeypatch.setattr(Generation, "output", failing)
            work = [last_output(front, prompt, GREEDY) for prompt in PROMPTS[:3]]
            failed, *others = await asyncio.gather(*work, return_exceptions=True)
            assert isinstance(failed, JpagedError) and "the log says more" in str(failed)
            assert all(each.finished for each in others)
            front.check_health()

    asyncio.run(run())
    assert gauges(engine) == [0, 0, 0]


def test_a_token_that_cannot_be_taken_in(engine, monkeypatch):
    """The other answers to the same prompt end with it: a request succeeds or fails as a whole."""
    take_token = engine.core._take_token

    def fail_on_eos(request, token, logprobs):
        if token == EOS:
            raise ValueError("no such token")
        return take_token(request, token, logprobs)

    monkeypatch.setattr(engine.core, "_take_token", fail_on_eos)
    params = SamplingParams(n=3, max_tokens=30, ignore_eos=True, seed=1)
    generations = [
        engine.make_request(str(number), {"prompt_token_ids": prompt}, params)
        for number, prompt in enumerate(PROMPTS)
    ]
    for generation in generations:
        engine.add_request(generation)
    while engine.has_unfinished:
        engine.step()
    reasons = [
        {each.finish_reason for each in generation.group.requests} for generation in generations
    ]
    assert {FinishReason.ERROR} in reasons
    assert engine.core.block_pool.num_used == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, max_tokens=4, ignore_eos=True),
        SamplingParams(best_of=3, max_tokens=4, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True),
        SamplingParams(max_tokens=0, prompt_logprobs=0),
    ],
)
def test_prompts_are_counted_once(engine, params):
    """O-89: the counter is the sum of the usage that clients see, however many answers."""
    for prompt in PROMPTS:
        engine.add_request(engine.make_request("r", {"prompt_token_ids": prompt}, params))
    while engine.has_unfinished:
        engine.step()
    rendered = engine.core.metrics.render()[0].decode().splitlines()
    [counted] = [line for line in rendered if line.startswith("jpaged:prompt_tokens_total{")]
    assert float(counted.rsplit(" ", 1)[1]) == sum(map(len, PROMPTS))


@pytest.mark.parametrize(
    "params,num_sequences,reason",
    [
        (SamplingParams(n=3, max_tokens=4, ignore_eos=True, seed=1), 3, "length"),
        (SamplingParams(best_of=3, max_tokens=4, ignore_eos=True, seed=1), 3, "length"),
        (SamplingParams(n=2, max_tokens=30, temperature=0), 2, "stop"),
        (BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True), 3, "length"),
    ],
    ids=["n", "best_of", "eos", "beams"],
)
def test_a_request_is_observed_once(engine, params, num_sequences, reason):
    """Its tokens are summed, and no sequence counts as a request of its own."""
    generation = engine.make_request("r", {"prompt_token_ids": PROMPTS[0]}, params)
    engine.add_request(generation)
    while engine.has_unfinished:
        engine.step()
    assert len(generation.group.requests) == num_sequences
    names = ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens")
    names += ("e2e_request_latency_seconds", "time_to_first_token_seconds")
    names += ("request_time_per_output_token_seconds", "request_decode_time_seconds")
    assert [metric(engine.core, f"{name}_count") for name in names] == [1] * len(names)
    generated = sum(each.num_output_tokens for each in generation.group.requests)
    assert metric(engine.core, "request_generation_tokens_sum") == generated
    assert metric(engine.core, "generation_tokens_total") == generated
    success = metric(engine.core, "request_success_total", f'finished_reason="{reason}"')
    assert success == metric(engine.core, "request_success_total") == 1


def test_a_full_pool_does_not_change_what_was_asked_for():
    """The histogram of max_tokens shows what clients ask for, not where the pool cut an answer."""
    engine = make_engine(
        ScriptedRunner(num_blocks=4, block_size=4, num_slots=2, max_num_tokens=32), cache=False
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    generation = engine.make_request("r", {"prompt_token_ids": [1, 0, 1]}, params)
    engine.add_request(generation)
    while engine.has_unfinished:
        engine.step()
    [request] = generation.group.requests
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_output_tokens < 40
    rendered = engine.core.metrics.render()[0].decode().splitlines()
    name = "jpaged:request_params_max_tokens_sum{"
    [asked] = [line for line in rendered if line.startswith(name)]
    assert float(asked.rsplit(" ", 1)[1]) == 40
