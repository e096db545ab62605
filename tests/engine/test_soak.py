"""Ten thousand requests, a thousand of them aborted: the host's time and memory stay flat."""

import gc
import random
from statistics import mean

import pytest

from jpaged.beam_search_params import BeamSearchParams
from jpaged.engine import Engine
from jpaged.inline_engine import InlineEngine
from jpaged.inputs import InputProcessor
from jpaged.metrics import Metrics
from jpaged.sampling_params import SamplingParams
from tests.engine.scripted_runner import VOCAB_SIZE, ScriptedRunner

NUM_REQUESTS, NUM_ABORTS = 10_000, 1_000
NUM_OPEN = 150  # running and waiting at once
NUM_PARTS = 10


class UnwatchedRunner(ScriptedRunner):
    """Moves no data: only the host's own work is measured."""

    def move_blocks(self, batch) -> None:
        pass

    def _write(self, request, start, num_tokens) -> None:
        pass

    def _read(self, request, num_tokens) -> list[int]:
        return [len(request.token_ids) % VOCAB_SIZE, num_tokens % VOCAB_SIZE]


def make_engine() -> InlineEngine:
    runner = UnwatchedRunner(num_blocks=400, block_size=16, num_slots=64, max_num_tokens=512)
    inputs = InputProcessor(None, vocab_size=VOCAB_SIZE, max_model_len=256, eos_token_ids=[])
    core = Engine(runner, Metrics(model_name="soak", max_model_len=256))
    return InlineEngine(core, inputs)


def draw_params(choose: random.Random):
    if choose.random() < 0.05:
        return BeamSearchParams(beam_width=3, max_tokens=choose.randint(1, 20))
    return SamplingParams(n=choose.choice([1, 1, 1, 2, 3]), max_tokens=choose.randint(1, 40))


@pytest.mark.long
def test_time_and_memory_stay_flat(capsys: pytest.CaptureFixture[str]) -> None:
    engine, choose = make_engine(), random.Random(0)
    beginnings = [[choose.randrange(VOCAB_SIZE) for _ in range(100)] for _ in range(20)]
    aborted = set(choose.sample(range(NUM_REQUESTS), NUM_ABORTS))
    open_groups: dict[int, object] = {}
    number, num_aborted, parts = 0, 0, []
    for part in range(1, NUM_PARTS + 1):
        timings = engine.core.step_timings = type(engine.core.step_timings)()
        while number < part * NUM_REQUESTS // NUM_PARTS:
            while len(open_groups) < NUM_OPEN and number < NUM_REQUESTS:
                prompt = choose.choice(beginnings)[: choose.randint(1, 100)]
                prompt = [*prompt, choose.randrange(VOCAB_SIZE)]
                generation = engine.make_request(
                    str(number), {"prompt_token_ids": prompt}, draw_params(choose)
                )
                engine.add_request(generation)
                open_groups[number] = generation
                number += 1
            for each in [each for each in open_groups if each in aborted and choose.random() < 0.1]:
                engine.abort(open_groups.pop(each))
                num_aborted += 1
            for generation in engine.step():
                if generation.is_finished:
                    generation.output()
                    open_groups.pop(int(generation.request_id), None)
        gc.collect()
        seconds = timings.scheduling + timings.processing
        parts.append((1e3 * seconds / timings.num_steps, len(gc.get_objects())))
    while engine.has_unfinished:
        engine.step()
    engine.core.scheduler.check_integrity()
    assert engine.core.block_pool.num_used == 0
    with capsys.disabled():
        print(f"\n{num_aborted} aborted in time; milliseconds of the host a step, objects alive:")
        print(*(f"{time:8.3f} {count:9,}" for time, count in parts), sep="\n")
    times, counts = zip(*parts, strict=True)
    assert mean(times[-3:]) < 1.5 * mean(times[1:4])
    assert mean(counts[-3:]) < 1.05 * mean(counts[1:4])
    assert num_aborted > NUM_ABORTS / 2
