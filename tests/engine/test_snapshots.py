"""How often a request is tokenized, and how often its answer is copied for a reader."""

import asyncio
from types import SimpleNamespace

import pytest

from jpaged.async_engine import AsyncEngine
from jpaged.config import EngineConfig
from jpaged.generation import Generation
from jpaged.sampling_params import SamplingParams
from tests.random_llama import save_random_llama

NUM_TOKENS = 12
PROMPT = {"prompt_token_ids": [7, 8, 9]}
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
def front(make_llm, tmp_path_factory):
    """An `AsyncEngine` around an engine that exists."""
    llm = make_llm(save_random_llama(tmp_path_factory.mktemp("random")))
    engine = AsyncEngine(EngineConfig(model="m"))
    engine._loaded = SimpleNamespace(engine=llm.engine.core, inputs=llm.engine.inputs)
    engine._thread.start()
    yield engine
    asyncio.run(engine.shutdown())


@pytest.fixture
def count_snapshots(monkeypatch):
    made = []
    output = Generation.output
    monkeypatch.setattr(Generation, "output", lambda self: made.append(self) or output(self))
    return made


async def read(front, *, skip_middle, pause=None):
    request = await front.prepare(PROMPT, PARAMS)
    outputs = []
    async for each in front.run(request, skip_middle=skip_middle):
        outputs.append(each)
        if pause is not None:
            await pause()
    return outputs


def test_who_waits_for_the_end_costs_two_snapshots(front, count_snapshots):
    _, output = asyncio.run(read(front, skip_middle=True))
    assert output.finished and len(output.outputs[0].token_ids) == NUM_TOKENS
    assert len(count_snapshots) == 2


def test_streams_get_every_token(front, count_snapshots):
    outputs = asyncio.run(read(front, skip_middle=False))
    lengths = [len(each.outputs[0].token_ids) for each in outputs]
    assert lengths == sorted(set(lengths)) and lengths[-1] == NUM_TOKENS
    assert len(count_snapshots) == len(outputs)
    # The prompt is not copied again for each of them.
    assert len({id(each.prompt_token_ids) for each in outputs}) == 1


def test_a_slow_reader_costs_nothing_while_it_does_not_read(front, count_snapshots):
    """O-40: what it gets at last is the whole answer."""

    async def until_idle():
        while front.engine.has_unfinished:
            await asyncio.sleep(0.01)

    outputs = asyncio.run(read(front, skip_middle=False, pause=until_idle))
    assert len(outputs[-1].outputs[0].token_ids) == NUM_TOKENS
    assert len(count_snapshots) == len(outputs) <= 3
