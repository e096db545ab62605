"""Ctrl-C in an offline call: it ends the call, and the engine goes on."""

import itertools
import os
import signal
from types import SimpleNamespace

import pytest

from jpaged.beam_search_params import BeamSearchParams
from jpaged.interrupts import held_interrupts
from jpaged.sampling_params import SamplingParams
from tests.random_llama import save_random_llama

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=2, seed=1)
PROMPTS = [
    {"prompt_token_ids": [(7 * start + index) % 200 for index in range(20)]} for start in (1, 2, 3)
]


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def interrupts_raise():
    """As in a terminal; a job in the background has its interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("moment", ["move_blocks", "pack", "launch", "forward"])
def test_engine_goes_on_after_an_interrupt(folder, make_llm, monkeypatch, moment, times):
    """O-82: wherever the signal lands, even after a program took the KV cache over and before its
    result is assigned; also when a second one follows."""
    llm = make_llm(folder)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    runner = llm.engine.core._runner
    steps = itertools.count()

    def interrupted(function):
        def call(*arguments):
            result = function(*arguments)
            if next(steps) == 3:
                for _ in range(times):
                    press_ctrl_c()
            return result

        return call

    with monkeypatch.context() as patched:
        if moment == "forward":  # its result is not assigned yet when it returns
            programs = runner.executor.programs
            forward = {shape: interrupted(each) for shape, each in programs.forward.items()}
            patched.setattr(
                runner.executor,
                "programs",
                SimpleNamespace(**{**vars(programs), "forward": forward}),
            )
        else:
            patched.setattr(runner, moment, interrupted(getattr(runner, moment)))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert not llm.engine.core.scheduler.has_requests
    after = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    assert after == expected
    assert llm.engine.core.block_pool.num_used == 0


def test_beams_and_refusals_leave_the_engine_usable(folder, make_llm, monkeypatch):
    """O-82"""
    llm = make_llm(folder)
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    [expected] = llm.beam_search(PROMPTS[0], params)
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (press_ctrl_c(), step())[1])
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search(PROMPTS, params)
    monkeypatch.undo()
    [again] = llm.beam_search(PROMPTS[0], params)
    assert again.outputs == expected.outputs


def test_interrupts_are_held_and_handed_on():
    """Where they are handled, and at the end; what was there before is there again."""
    before = signal.getsignal(signal.SIGINT)
    with held_interrupts() as handle:
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            handle()
        handle()  # handled once
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        press_ctrl_c()
    with pytest.raises(ValueError, match="another"), held_interrupts():
        press_ctrl_c()
        raise ValueError("another error is not replaced")
    assert signal.getsignal(signal.SIGINT) is before
