"""Token ids become text behind the engine, which may be some steps ahead."""

import asyncio
import time
from pathlib import Path

import pytest

from jpaged.async_engine import MAX_STEPS_AHEAD
from jpaged.inline_engine import InlineEngine
from jpaged.output_processor import OutputProcessor
from jpaged.outputs import FinishReason
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from tests.doubles import byte_tokenizer, save_tokenizer
from tests.engine.scripted_runner import ScriptedRunner
from tests.engine.test_containment import last_output, started
from tests.engine.test_engine_machine import make_engine

PROMPT = [1, 0, 1, 3]
NUM_TOKENS = 40


@pytest.fixture
def engine(tmp_path: Path) -> InlineEngine:
    engine = make_engine(
        ScriptedRunner(num_blocks=60, block_size=4, num_slots=8, max_num_tokens=32)
    )
    save_tokenizer(byte_tokenizer(), tmp_path)
    engine.inputs.tokenizer = Tokenizer.from_folder(tmp_path)
    return engine


def params(**options) -> SamplingParams:
    return SamplingParams(
        n=2, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1, **options
    )


def answers(engine: InlineEngine, **options):
    generation = engine.make_request("r", {"prompt_token_ids": PROMPT}, params(**options))
    engine.add_request(generation)
    while engine.has_unfinished:
        engine.step()
    return generation.output().outputs


class Commands:
    """What the engine is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def stop(self, group, index: int) -> None:
        self.told.append(index)

    def abort(self, group) -> None:
        self.told.append("abort")

    def fail(self, group, error: Exception) -> None:
        raise error


@pytest.mark.parametrize("num_together", [1, 4, NUM_TOKENS])
def test_tokens_after_a_stop_string_are_dropped(engine, num_together):
    """However many steps the engine is ahead: tokens and log-probabilities of the answer end where
    the stop string does, the other answer goes on, and the engine is told once."""
    whole, other = answers(engine)
    stop = whole.text[9:12]
    expected = answers(engine, stop=stop)
    assert len(expected[0].token_ids) < NUM_TOKENS - 4
    commands = Commands()
    outputs = OutputProcessor(commands)
    generation = engine.inputs.request("r", {"prompt_token_ids": PROMPT}, params(stop=stop))
    outputs.add(generation)
    engine.core.add_request(generation.group)
    updates = []
    while engine.core.has_unfinished:
        updates += engine.core.step()
        if len(updates) >= num_together or not engine.core.has_unfinished:
            outputs.process(updates)
            updates = []
    assert generation.output().outputs == expected
    assert expected[0].text == whole.text[: whole.text.index(stop)]
    assert (expected[0].finish_reason, expected[0].stop_reason) == (FinishReason.STOP, stop)
    assert expected[1] == other
    assert commands.told == [0]


def test_the_engine_waits_for_a_slow_event_loop(engine, monkeypatch):
    """What it computes beyond a stop string is bounded."""
    expected = answers(engine)
    steps: list[int] = []
    step = engine.core.step

    def counted():
        steps.append(0)
        return step()

    monkeypatch.setattr(engine.core, "step", counted)

    async def run():
        async with started(engine, monkeypatch) as front:
            task = asyncio.create_task(last_output(front, PROMPT, params()))
            while not steps:
                await asyncio.sleep(0.001)
            before, count = len(steps), -1
            while count < len(steps):
                count = len(steps)
                time.sleep(0.3)  # the loop does nothing meanwhile
            assert count - before <= MAX_STEPS_AHEAD + 1 < NUM_TOKENS
            return await task

    assert asyncio.run(run()).outputs == expected
