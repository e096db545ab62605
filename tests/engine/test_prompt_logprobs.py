"""Log-probabilities of prompts: those of transformers, whatever is cached, chunked or preempted."""

import numpy as np
import pytest

from jpaged.beam_search_params import BeamSearchParams
from jpaged.errors import PromptTooLongError, RequestError
from jpaged.outputs import FinishReason, RequestOutput
from jpaged.sampling_params import SamplingParams
from tests.random_llama import save_random_llama


def score(number: int = 2, **options) -> SamplingParams:
    return SamplingParams(max_tokens=0, prompt_logprobs=number, **options)


def values(output: RequestOutput) -> np.ndarray:
    """[tokens - 1, 1 + number]"""
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    return np.array(
        [[each.logprob, *(lp for _, lp in each.top)] for each in output.prompt_logprobs[1:]]
    )


def ask(llm, token_ids, params, salt: str | None = None) -> RequestOutput:
    prompt = {"prompt_token_ids": list(token_ids)}
    [output] = llm.generate([prompt if salt is None else prompt | {"cache_salt": salt}], params)
    llm.engine.core.scheduler.check_integrity()
    return output


@pytest.mark.torch
@pytest.mark.parametrize("length", [2, 17, 33, 90])
def test_equal_to_transformers(length, tiny_llama, hf_model, make_llm):
    """R2, with prompts longer and shorter than a step; alone and beside other requests."""
    import torch

    folder = tiny_llama(initializer_range=0.1)
    token_ids = [(7 * index) % 250 for index in range(length)]
    with torch.no_grad():
        logits = hf_model(folder)(torch.tensor([token_ids])).logits[0].double()
    expected = torch.log_softmax(logits, -1).numpy()
    llm = make_llm(folder)
    work = [
        ({"prompt_token_ids": token_ids, "cache_salt": "cold"}, score(3)),
        ({"prompt_token_ids": [5] * 40}, SamplingParams(max_tokens=9, ignore_eos=True)),
        ({"prompt_token_ids": token_ids}, SamplingParams(max_tokens=4, prompt_logprobs=3)),
    ]
    scored, _, answered = llm.generate([each[0] for each in work], [each[1] for each in work])
    for output in (scored, answered):
        assert len(output.prompt_logprobs) == length
        for position, entry in enumerate(output.prompt_logprobs[1:], 1):
            row = expected[position - 1]
            assert abs(entry.logprob - row[token_ids[position]]) < 1e-3
            best = np.sort(row)[::-1][:3]
            np.testing.assert_allclose([lp for _, lp in entry.top], best, atol=1e-3)
            for token_id, logprob in entry.top:
                assert abs(row[token_id] - logprob) < 1e-3
    assert scored.outputs[0].token_ids == () and len(answered.outputs[0].token_ids) == 4
    assert scored.outputs[0].finish_reason is FinishReason.LENGTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def cold(folder, make_llm):
    return lambda token_ids, params: values(
        ask(make_llm(folder, enable_prefix_caching=False), token_ids, params)
    )


def test_cached_tokens_keep_their_scores(folder, make_llm, cold):
    """O-06: 33 tokens twice, then two prompts that share 32 tokens, in both orders."""
    llm = make_llm(folder)
    first, other = [*range(33)], [*range(32), 150]
    expected = {33: cold(first, score()), 150: cold(other, score())}
    for name, prompts in [("one", [first, first, other]), ("two", [other, first, first])]:
        hits = []
        for prompt in prompts:
            output = ask(llm, prompt, score(), salt=name)
            wanted = expected[33 if prompt is first else 150]
            np.testing.assert_allclose(values(output), wanted, atol=1e-4)
            hits.append(output.num_cached_tokens)
        # The last of 32 known tokens is computed again, for the score of the token behind it.
        assert hits == [0, 16, 16]  # whole blocks


def test_scores_that_nobody_kept_are_computed(folder, make_llm, cold):
    """O-06: K/V alone do not do, nor do scores with fewer of the most likely tokens."""
    llm = make_llm(folder)
    prompt = [*range(100, 150)]
    plain = SamplingParams(temperature=0, max_tokens=1)
    assert ask(llm, prompt, plain).num_cached_tokens == 0
    for number, hit in [(1, 0), (1, 32), (0, 32), (5, 0), (3, 32), (5, 32)]:
        output = ask(llm, prompt, score(number))
        assert output.num_cached_tokens == hit, number
        np.testing.assert_allclose(values(output), cold(prompt, score(number)), atol=1e-4)
    # Part of a block: scores up to the place where the prompts part, and new ones behind it.
    parted = [*prompt[:42], 7, 7, 7]
    output = ask(llm, parted, score(2))
    assert output.num_cached_tokens == 32
    np.testing.assert_allclose(values(output), cold(parted, score(2)), atol=1e-4)
    assert ask(llm, prompt, plain).num_cached_tokens == 48


def test_prompts_of_one_token_and_of_the_whole_context(folder, make_llm):
    llm = make_llm(folder, max_model_len=64)
    assert ask(llm, [5], score()).prompt_logprobs == (None,)
    assert values(ask(llm, range(64), score())).shape == (63, 3)
    with pytest.raises(PromptTooLongError, match="65 tokens"):
        ask(llm, range(65), score())
    with pytest.raises(PromptTooLongError, match="64 tokens"):
        ask(llm, range(64), SamplingParams(max_tokens=1, prompt_logprobs=1))


@pytest.mark.parametrize(
    "options,message",
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs must be an integer from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be"),
        ({"prompt_logprobs": True}, "prompt_logprobs must be"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        (
            {"max_tokens": 0, "prompt_logprobs": 0, "n": 2},
            "max_tokens must be an integer of at least 1, got 0",
        ),
        ({"max_tokens": False, "prompt_logprobs": 0}, "max_tokens must be an integer"),
    ],
)
def test_bad_parameters(options, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)
    with pytest.raises(RequestError, match="max_tokens"):
        BeamSearchParams(beam_width=2, max_tokens=0, prompt_logprobs=1)


def test_scoring_counts_in_the_metrics(folder, make_llm):
    llm = make_llm(folder)

    def counts() -> list[float]:
        lines = llm.engine.core.metrics.render()[0].decode().splitlines()
        names = ("prompt_tokens_total{", "prefix_cache_hits_total{", "request_success_total{")
        return [
            sum(float(line.split()[-1]) for line in lines if line.startswith("jpaged:" + name))
            for name in names
        ]

    before = counts()
    for _ in range(2):
        ask(llm, range(20, 60), score(), salt="metrics")
    assert [now - old for now, old in zip(counts(), before, strict=True)] == [80, 16, 2]
