"""Beam search on shared blocks, against transformers."""

import itertools

import pytest

from jpaged.beam_search_params import BeamSearchParams
from jpaged.errors import RequestError
from jpaged.outputs import FinishReason
from jpaged.sampling_params import SamplingParams
from tests.demo_engine import DEMO_OPTIONS
from tests.demo_prompts import DEMO_PROMPTS
from tests.random_llama import save_random_llama

NUM_TOKENS = 20
EOS = 7


def hf_beams(model, prompt, *, width, length_penalty, early_stopping, eos=None, count=NUM_TOKENS):
    """Sequences and scores of transformers, best first."""
    import torch

    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=count,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=eos,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    answers = []
    for sequence in output.sequences[:, len(prompt) :].tolist():
        ends = [place for place, token in enumerate(sequence) if token in (eos or ())]
        answers.append(tuple(sequence[: ends[0] + 1] if ends else sequence))
    return answers, output.sequences_scores.tolist()


def ours(llm, prompts, **options):
    params = BeamSearchParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **options})
    token_prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.beam_search(token_prompts, params, use_tqdm=False)
    assert llm.engine.core.block_pool.num_used == 0
    llm.engine.core.scheduler.check_integrity()
    return [
        ([each.token_ids for each in output.outputs], [each.score for each in output.outputs])
        for output in outputs
    ]


def assert_equal_beams(got, expected):
    assert got[1] == pytest.approx(expected[1], abs=1e-3)
    assert got[0] == expected[0]


PROMPTS = [[5, 9, 200, 31, 8], list(range(40, 59)), [(7 * index) % 250 for index in range(32)]]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "width", [4, pytest.param(2, marks=pytest.mark.long), pytest.param(6, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "length_penalty,early_stopping",
    [
        (0.0, True),
        (1.0, False),
        (2.0, True),
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in [(0.0, False), (1.0, True), (2.0, False)]
        ),
    ],
)
def test_equal_to_transformers(
    width, length_penalty, early_stopping, tiny_llama, hf_model, make_llm
):
    """O-22: the same sequences in the same order, with a likely end-of-sequence token."""
    folder = tiny_llama(initializer_range=0.1)
    llm = make_llm(folder)
    for eos in (None, [EOS]):
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        stops = {} if eos is None else {"stop_token_ids": eos}
        expected = [
            hf_beams(hf_model(folder), prompt, width=width, eos=eos, **options)
            for prompt in PROMPTS
        ]
        got = ours(llm, PROMPTS, beam_width=width, **options, **stops)
        for one, other in zip(got, expected, strict=True):
            assert_equal_beams(one, other)


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize("width", [2, 4, 6])
def test_demo_model_equal_to_transformers(width, demo_model_path, demo_hf_model, make_llm):
    """O-22 on real text, where end-of-sequence and neighbours' scores are those of a real model."""
    llm = make_llm(demo_model_path, **DEMO_OPTIONS)
    eos = sorted(llm.engine.inputs.eos_token_ids)
    settings = itertools.product([0.0, 1.0, 2.0], [True, False])
    for number, (length_penalty, early_stopping) in enumerate(settings):
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        # Every prompt with some of the settings.
        prompts = [llm.tokenizer.encode(text) for text in DEMO_PROMPTS[3 * number :][:1]]
        expected = [
            hf_beams(demo_hf_model, prompt, width=width, eos=eos, **options) for prompt in prompts
        ]
        got = ours(llm, prompts, beam_width=width, ignore_eos=False, **options)
        for one, other in zip(got, expected, strict=True):
            assert_equal_beams(one, other)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("random"))


def test_beside_ordinary_requests(folder, make_llm):
    llm = make_llm(folder)
    expected = ours(llm, PROMPTS[:1], beam_width=4)[0]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPTS[1]}
    alone = llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids
    beams = llm.engine.make_request(
        "beams",
        {"prompt_token_ids": PROMPTS[0]},
        BeamSearchParams(beam_width=4, max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    others = [llm.engine.make_request(str(n), prompt, greedy) for n in range(3)]
    for generation in (others[0], beams, *others[1:]):
        llm.engine.add_request(generation)
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert [each.token_ids for each in beams.output().outputs] == expected[0]
    assert all(generation.output().outputs[0].token_ids == alone for generation in others)


def test_a_step_copies_at_most_the_tails(folder, make_llm):
    """Full blocks are shared by their reference counts; no prompt is computed twice."""
    llm = make_llm(folder)
    prompt = {"prompt_token_ids": list(range(100, 139)), "cache_salt": "copies"}
    generation = llm.engine.make_request(
        "beams", prompt, BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True)
    )
    llm.engine.add_request(generation)
    schedule, batches = llm.engine.core.scheduler.schedule, []

    def recording_schedule():
        batches.append(schedule())
        return batches[-1]

    llm.engine.core.scheduler.schedule = recording_schedule
    try:
        while llm.engine.has_unfinished:
            llm.engine.step()
    finally:
        del llm.engine.core.scheduler.schedule
    sizes = [batch.num_tokens for batch in batches if batch.num_tokens]
    assert sizes == [39] + [4] * 29
    assert all(len(batch.copies) <= 4 for batch in batches)
    assert any(batch.copies for batch in batches)


def test_shared_beginnings_are_streamed(folder, make_llm):
    """What is shown before the end is what every answer begins with."""
    llm = make_llm(folder)
    generation = llm.engine.make_request(
        "beams",
        {"prompt_token_ids": PROMPTS[0]},
        BeamSearchParams(beam_width=3, max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    llm.engine.add_request(generation)
    snapshots = []
    while llm.engine.has_unfinished:
        for progressed in llm.engine.step():
            snapshots.append(progressed.output())
    final = snapshots[-1]
    assert final.finished and len(final.outputs) == 3
    for snapshot in snapshots:
        shown = snapshot.outputs[0].token_ids
        for answer in final.outputs if not snapshot.finished else ():
            assert answer.token_ids[: len(shown)] == shown


def test_stop_strings_end_hypotheses(folder, make_llm):
    llm = make_llm(folder)
    [plain] = llm.beam_search(
        [{"prompt_token_ids": PROMPTS[0]}],
        BeamSearchParams(beam_width=2, max_tokens=NUM_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    stop = plain.outputs[0].text[3:5]
    [output] = llm.beam_search(
        [{"prompt_token_ids": PROMPTS[0]}],
        BeamSearchParams(beam_width=2, max_tokens=NUM_TOKENS, ignore_eos=True, stop=[stop]),
        use_tqdm=False,
    )
    stopped = [each for each in output.outputs if each.finish_reason is FinishReason.STOP]
    assert stopped and all(each.stop_reason == stop for each in stopped)
    assert all(stop not in each.text for each in output.outputs)


def test_logprobs_add_up(folder, make_llm):
    llm = make_llm(folder)
    [output] = llm.beam_search(
        [{"prompt_token_ids": PROMPTS[0]}],
        BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True, logprobs=2),
        use_tqdm=False,
    )
    for answer in output.outputs:
        assert len(answer.logprobs) == len(answer.token_ids) == 9
        total = sum(each.logprob for each in answer.logprobs)
        assert total == pytest.approx(answer.cumulative_logprob, abs=1e-4)
        assert answer.score == pytest.approx(answer.cumulative_logprob / 9)
        assert all(len(each.top) == 2 for each in answer.logprobs)


def test_a_pool_too_small_for_all_beams(folder, make_llm):
    """The search ends by length with what it has, and nothing is lost."""
    llm = make_llm(folder, num_gpu_blocks_override=5, max_model_len=256)
    [(answers, _)] = ours(llm, PROMPTS[1:2], beam_width=4, max_tokens=100)
    assert len(answers) == 4 and 0 < len(answers[0]) < 100


def test_aborting_frees_all_beams(folder, make_llm):
    llm = make_llm(folder)
    for num_steps in (1, 2, 5):
        generation = llm.engine.make_request(
            "beams", {"prompt_token_ids": PROMPTS[1]}, BeamSearchParams(beam_width=4, max_tokens=50)
        )
        llm.engine.add_request(generation)
        for _ in range(num_steps):
            llm.engine.step()
        llm.engine.abort(generation)
        while llm.engine.has_unfinished:
            llm.engine.step()
        llm.engine.core.scheduler.check_integrity()
        assert llm.engine.core.block_pool.num_used == 0


@pytest.mark.parametrize(
    "options,message",
    [
        ({"beam_width": 0}, "beam_width must be an integer from 1 to 16, got 0"),
        ({"beam_width": 17}, "beam_width must be"),
        ({"beam_width": 3, "n": 4}, "n must be an integer from 1 to 3"),
        ({"beam_width": 3, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 3, "early_stopping": "never"}, "early_stopping"),
        ({"beam_width": 3, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_parameters(options, message):
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**options)


def test_widths_beyond_the_engine(folder, make_llm):
    llm = make_llm(folder)
    with pytest.raises(RequestError, match="beam_width 9 is more than max_num_seqs, 8"):
        ours(llm, PROMPTS, beam_width=9)
    with pytest.raises(RequestError, match="beam_width 8 with 4 stop tokens needs 40"):
        ours(llm, PROMPTS, beam_width=8, stop_token_ids=[1, 2, 3, 4])
