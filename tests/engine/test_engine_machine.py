"""The whole engine but for the model, under random operations in any order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.beam_search_params import BeamSearchParams
from jpaged.engine import Engine
from jpaged.errors import RequestError
from jpaged.generation import Generation
from jpaged.inline_engine import InlineEngine
from jpaged.inputs import InputProcessor, seed_of_answer
from jpaged.metrics import Metrics
from jpaged.outputs import FinishReason
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling.beam_group import BeamGroup
from jpaged.scheduling.request import Request
from tests.engine.scripted_runner import VOCAB_SIZE, ScriptedRunner, draw, logprobs_of

MAX_MODEL_LEN = 48
EOS = 7


def make_engine(runner: ScriptedRunner, *, cache: bool = True, mode="auto") -> InlineEngine:
    inputs = InputProcessor(
        None, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, eos_token_ids=[EOS]
    )
    core = Engine(
        runner,
        Metrics(model_name="scripted", max_model_len=MAX_MODEL_LEN),
        enable_prefix_caching=cache,
        preemption_mode=mode,
        check_invariants=True,
    )
    runner.watch(core.block_pool)
    return InlineEngine(core, inputs)


def expected_answer(prompt: list[int], request: Request, begun: list[int]) -> list[int]:
    """What the request's own tokens must be, without any engine. begun: those of its parent."""
    answer = list(begun)
    eos = None if request.params.ignore_eos else EOS
    while len(answer) < request.max_tokens and answer[-1:] != [eos]:
        answer.append(draw(prompt + answer, request))
    return answer


def expected_beams(prompt: list[int], params: BeamSearchParams):
    """Of an engine that has nothing else to do, and all the memory it wants."""
    engine = make_engine(
        ScriptedRunner(num_blocks=64, block_size=4, num_slots=8, max_num_tokens=64), cache=False
    )
    generation = engine.make_request("alone", {"prompt_token_ids": prompt}, params)
    engine.add_request(generation)
    while engine.has_unfinished:
        engine.step()
    return [(each.token_ids, each.score) for each in generation.output().outputs]


# Few tokens, so that prompts begin alike now and then.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class EngineMachine(RuleBasedStateMachine):
    """O-03, O-04, O-07, O-14: whatever is added, forked, aborted and preempted, in any order: no
    answer reads a block of another one, or one that is not written; none is lost; all end with
    the tokens that they would have had alone."""

    @initialize(
        num_blocks=st.integers(7, 14),
        num_slots=st.integers(3, 6),
        budget=st.integers(6, 24),
        cache=st.booleans(),
        mode=st.sampled_from(["recompute", "swap"]),
        num_swap=st.sampled_from([6, 100]),
    )
    def start(self, num_blocks, num_slots, budget, cache, mode, num_swap) -> None:
        self.runner = ScriptedRunner(
            num_blocks=num_blocks,
            block_size=4,
            num_slots=num_slots,
            max_num_tokens=budget,
            num_swap=num_swap,
        )
        self.engine = make_engine(self.runner, cache=cache, mode=mode)
        self.capacity = num_blocks * 4
        self.prompts: dict[Generation, list[int]] = {}
        self.aborted: set[Generation] = set()
        self.begun: dict[Request, list[int]] = {}  # answers of forks when they began
        self.cut: set[Request] = set()  # ended by a pool that holds no more tokens
        schedule = self.engine.core.scheduler.schedule

        def watched_schedule():
            batch = schedule()
            self.cut.update(each for each in batch.finished if each.params.max_tokens)
            return batch

        self.engine.core.scheduler.schedule = watched_schedule

    @rule(
        prompt=PROMPTS,
        max_tokens=st.sampled_from([1, 7, 20, 27]),
        ignore_eos=st.booleans(),
        n=st.integers(1, 4),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 5),
        salt=st.sampled_from(["a", "b"]),
        prompt_logprobs=st.sampled_from([None, None, 1, 3]),
    )
    def add(
        self, prompt, max_tokens, ignore_eos, n, temperature, seed, salt, prompt_logprobs
    ) -> None:
        params = SamplingParams(
            n=n,
            temperature=temperature,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            logprobs=1,
            prompt_logprobs=prompt_logprobs,
        )
        self._add(prompt, params, salt)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.sampled_from([2, 14, 24]),
        ignore_eos=st.booleans(),
        width=st.integers(1, 4),
        prompt_logprobs=st.sampled_from([None, None, 2]),
    )
    def add_beams(self, prompt, max_tokens, ignore_eos, width, prompt_logprobs) -> None:
        params = BeamSearchParams(
            beam_width=min(width, self.engine.core.max_num_seqs),
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
        )
        self._add(prompt, params, "a")

    @rule(prompt=PROMPTS, salt=st.sampled_from(["a", "b"]), number=st.integers(0, 3))
    def score(self, prompt, salt, number) -> None:
        self._add(prompt, SamplingParams(max_tokens=0, seed=0, prompt_logprobs=number), salt)

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data(), seed=st.integers(0, 5))
    def fork(self, data, seed) -> None:
        generation = data.draw(st.sampled_from(self._unfinished()))
        index = data.draw(st.integers(0, len(generation.group.requests) - 1))
        is_going_on = (
            not generation.group.requests[index].is_finished and generation.params.max_tokens != 0
        )
        is_possible = is_going_on and not isinstance(generation.group, BeamGroup)
        try:
            number = self.engine.fork(generation, index, seed=seed)
        except RequestError:
            assert not is_possible
        else:
            child = generation.group.requests[number]
            assert is_possible and child.seed == seed
            self.begun[child] = child.token_ids[child.num_prompt_tokens :]

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data())
    def abort(self, data) -> None:
        generation = data.draw(st.sampled_from(self._unfinished()))
        self.engine.abort(generation)
        self.aborted.add(generation)

    @rule(count=st.integers(1, 12))
    def step(self, count) -> None:
        for _ in range(count):
            if self.engine.has_unfinished:
                self.engine.step()

    @invariant()
    def known_blocks_hold_what_they_are_known_for(self) -> None:
        scheduler = self.engine.core.scheduler
        scheduler.check_integrity()
        cache = scheduler.tables.prefix_cache
        for block in scheduler.block_pool.registered_blocks() if cache else ():
            assert self.runner.pool[block].tolist() == list(cache.token_ids(block))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_unfinished:
                break
            self.engine.step()
        assert not self.engine.has_unfinished, "no progress"
        scheduler = self.engine.core.scheduler
        assert scheduler.block_pool.num_used == 0
        assert scheduler.swap_space.num_used == 0
        for generation, prompt in self.prompts.items():
            if generation not in self.aborted:
                self._check(generation, prompt)

    def _add(self, prompt: list[int], params, salt: str) -> None:
        fields = {"prompt_token_ids": prompt, "cache_salt": salt}
        try:
            generation = self.engine.make_request(str(len(self.prompts)), fields, params)
        except RequestError:
            assert len(prompt) > self.capacity or len(prompt) + params.max_tokens > MAX_MODEL_LEN
            return
        self.engine.add_request(generation)
        self.prompts[generation] = list(prompt)

    def _unfinished(self) -> list[Generation]:
        return [
            generation for generation in getattr(self, "prompts", ()) if not generation.is_finished
        ]

    def _check(self, generation: Generation, prompt: list[int]) -> None:
        outputs = generation.output().outputs
        number = generation.params.prompt_logprobs
        if number is not None and not self.cut & set(generation.group.requests):
            expected = [
                logprobs_of(prompt[:position], prompt[position], number)
                for position in range(1, len(prompt))
            ]
            assert generation.output().prompt_logprobs == (None, *expected)
        if isinstance(generation.group, BeamGroup):
            if not self.cut & set(generation.group.requests):
                got = [(each.token_ids, each.score) for each in outputs]
                assert got == expected_beams(prompt, generation.group.beam_params)
            return
        for request, output in zip(generation.group.requests, outputs, strict=True):
            answer = list(output.token_ids)
            if request not in self.begun:
                assert request.seed == seed_of_answer(generation.params.seed, request.index)
            expected = expected_answer(prompt, request, self.begun.get(request, []))
            if request in self.cut or len(answer) < len(expected):  # the pool was full
                assert request.finish_reason is FinishReason.LENGTH
                assert len(prompt) + len(answer) > self.capacity - 16
                expected = expected[: len(answer)]
            assert answer == expected
            assert len(output.logprobs or ()) == len(answer)


EngineMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.long
class TestManyExamples(EngineMachine.TestCase):
    settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
