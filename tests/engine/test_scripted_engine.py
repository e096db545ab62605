"""The whole engine but for the model, in short scenes; see also test_engine_machine.py."""

import pytest

from jpaged.beam_search_params import BeamSearchParams
from jpaged.errors import RequestError
from jpaged.generation import Generation
from jpaged.inline_engine import InlineEngine
from jpaged.sampling_params import SamplingParams
from tests.engine.scripted_runner import VOCAB_SIZE, ScriptedRunner, scores
from tests.engine.test_containment import metric
from tests.engine.test_engine_machine import EOS, expected_answer, make_engine

PROMPT = [0, 1, 1, 0, 1, 0, 0, 1, 1, 1]


def small_engine(*, num_blocks: int = 32, num_swap: int = 0, **options) -> InlineEngine:
    runner = ScriptedRunner(
        num_blocks=num_blocks, block_size=4, num_slots=6, max_num_tokens=16, num_swap=num_swap
    )
    return make_engine(runner, **options)


def added(engine: InlineEngine, prompt: list[int], params, **fields) -> Generation:
    generation = engine.make_request("r", {"prompt_token_ids": prompt, **fields}, params)
    engine.add_request(generation)
    return generation


def run(engine: InlineEngine) -> None:
    while engine.has_unfinished:
        engine.step()
    assert engine.core.block_pool.num_used == 0


def sampling(max_tokens: int = 12, **options) -> SamplingParams:
    values = {"temperature": 0.0, "seed": 3, "ignore_eos": True, **options}
    return SamplingParams(max_tokens=max_tokens, **values)


def assert_answered(generation: Generation, prompt: list[int]) -> None:
    for request, output in zip(generation.group.requests, generation.output().outputs, strict=True):
        assert list(output.token_ids) == expected_answer(prompt, request, [])


def test_the_beginning_of_a_block_is_copied():
    """The second prompt goes on within a block of the first one."""
    engine = small_engine()
    added(engine, PROMPT, sampling())
    run(engine)
    other = [*PROMPT[:7], 1 - PROMPT[7], 0, 0]
    generation = added(engine, other, sampling())
    run(engine)
    assert generation.output().num_cached_tokens > 0
    assert_answered(generation, other)


def test_other_salts_find_nothing():
    """O-08"""
    engine, hits = small_engine(), []
    for salt in ("a", "b", "a", "b"):
        generation = added(engine, PROMPT, sampling(), cache_salt=salt)
        run(engine)
        hits.append(generation.output().num_cached_tokens > 0)
    assert hits == [False, False, True, True]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_go_on_where_they_were(mode):
    """O-14: three prompts and answers need twice the blocks that there are."""
    engine = small_engine(num_blocks=8, num_swap=100, mode=mode, cache=False)
    prompts = [[number, *PROMPT[number:]] for number in range(3)]
    generations = [added(engine, prompt, sampling(20)) for prompt in prompts]
    num_swapped = 0
    while engine.has_unfinished:
        engine.step()
        num_swapped += engine.core.scheduler.num_swapped
    assert (num_swapped > 0) == (mode == "swap")
    assert sum(generation.group.requests[0].num_preemptions for generation in generations) > 0
    for generation, prompt in zip(generations, prompts, strict=True):
        assert_answered(generation, prompt)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_abort_frees_all_blocks(num_steps):
    """O-04: of a request that waits, is computed in chunks, or decodes; others go on."""
    engine = small_engine()
    other = added(engine, PROMPT, sampling())
    generation = added(engine, PROMPT * 3, sampling(n=2))
    for _ in range(num_steps):
        engine.step()
    engine.abort(generation)
    assert engine.core.scheduler.running == other.group.requests[: bool(num_steps)]
    run(engine)
    assert_answered(other, PROMPT)


def test_nothing_comes_after_the_end():
    """O-40: a step ahead, the token behind the last one has been sampled as well."""
    engine = small_engine()
    prompts = [[*PROMPT, number] for number in range(VOCAB_SIZE)]
    generations = [added(engine, prompt, sampling(30, ignore_eos=False)) for prompt in prompts]
    run(engine)
    assert any(generation.output().outputs[0].token_ids[-1] == EOS for generation in generations)
    for generation, prompt in zip(generations, prompts, strict=True):
        assert_answered(generation, prompt)
    num_tokens = sum(len(generation.output().outputs[0].token_ids) for generation in generations)
    assert metric(engine.core, "generation_tokens_total") == num_tokens


def test_answers_to_one_prompt_differ():
    """O-15"""
    engine = small_engine()
    generation = added(engine, PROMPT, sampling(n=4, temperature=1.0))
    run(engine)
    assert len({output.token_ids for output in generation.output().outputs}) == 4
    assert_answered(generation, PROMPT)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_go_on_from_their_parents(length_penalty):
    """O-22: against a search that keeps whole sequences and no K/V."""
    width, num_tokens = 4, 14
    engine = small_engine()
    params = BeamSearchParams(
        beam_width=width, max_tokens=num_tokens, ignore_eos=True, length_penalty=length_penalty
    )
    generation = added(engine, PROMPT, params)
    run(engine)
    beams = [(0.0, [])]
    for _ in range(num_tokens):
        grown = [
            (total + logprob, [*tokens, token])
            for total, tokens in beams
            for token, logprob in enumerate(scores(PROMPT + tokens))
        ]
        beams = sorted(grown, key=lambda beam: -beam[0])[:width]
    outputs = generation.output().outputs
    assert [list(output.token_ids) for output in outputs] == [tokens for _, tokens in beams]
    expected = [total / num_tokens**length_penalty for total, _ in beams]
    assert [output.score for output in outputs] == pytest.approx(expected)


@pytest.mark.parametrize("num_steps", range(4))
def test_a_fork_of_a_single_token(num_steps):
    """Whatever of the parent's is computed, read or on its way."""
    engine = small_engine(cache=False)
    generation = added(engine, PROMPT[:1], sampling(6))
    for _ in range(num_steps):
        engine.step()
    engine.fork(generation, 0, seed=3)
    run(engine)
    assert_answered(generation, PROMPT[:1])


def test_seed_minus_1_draws_one_each_time():
    """O-74: any other seed repeats its answers, those of n > 1 too."""
    engine = small_engine()
    for seed, repeats in ((-1, False), (None, False), (-2, True), (0, True)):
        params = sampling(temperature=1.0, seed=seed, n=2, max_tokens=16)
        generations = [added(engine, PROMPT, params) for _ in range(4)]
        run(engine)
        for index in range(2):
            answers = {generation.output().outputs[index].token_ids for generation in generations}
            assert (len(answers) == 1) == repeats, seed


@pytest.mark.parametrize("salt", ["", "s" * 257, 5])
def test_bad_salts_are_refused(salt):
    with pytest.raises(RequestError, match="cache_salt must be a text of 1 to 256 characters"):
        added(small_engine(), PROMPT, sampling(), cache_salt=salt)
