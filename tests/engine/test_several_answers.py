"""n and best_of: one prompt, several answers on shared blocks."""

import numpy as np
import pytest

from jpaged.errors import RequestError
from jpaged.sampling_params import SamplingParams
from tests.random_llama import save_random_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("random"))


def tokens(length: int, first: int = 0) -> dict:
    return {"prompt_token_ids": [(first + 7 * index) % 200 for index in range(length)]}


def sampled(**options) -> SamplingParams:
    values = {"temperature": 1.0, "seed": 7, "max_tokens": 20, "ignore_eos": True, **options}
    return SamplingParams(**values)


def answers(output) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("length", [19, 32])
@pytest.mark.parametrize("cache", [True, False])
def test_each_answer_reads_its_own_blocks(folder, make_llm, length, cache):
    """O-03: every answer's log-probabilities are those of computing prompt + answer afresh."""
    llm = make_llm(folder, enable_prefix_caching=cache)
    [output] = llm.generate([tokens(length)], sampled(n=4, logprobs=1), use_tqdm=False)
    assert len(set(answers(output))) == 4
    for completion in output.outputs:
        for count in range(len(completion.token_ids)):
            known = tokens(length)["prompt_token_ids"] + list(completion.token_ids[:count])
            greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
            [alone] = llm.generate([{"prompt_token_ids": known}], greedy, use_tqdm=False)
            best, logprob = alone.outputs[0].logprobs[0].top[0]
            assert completion.logprobs[count].top[0][0] == best
            assert abs(completion.logprobs[count].top[0][1] - logprob) < 1e-3
    assert llm.engine.core.block_pool.num_used == 0


def test_best_of_returns_the_likeliest(folder, make_llm):
    llm = make_llm(folder)
    [every] = llm.generate([tokens(19)], sampled(n=5, logprobs=0), use_tqdm=False)
    [best] = llm.generate([tokens(19)], sampled(n=2, best_of=5), use_tqdm=False)
    scores = [completion.cumulative_logprob for completion in every.outputs]
    order = np.argsort(scores)[::-1][:2]
    assert answers(best) == [answers(every)[index] for index in order]
    assert [completion.index for completion in best.outputs] == [0, 1]
    assert all(completion.logprobs is None for completion in best.outputs)


@pytest.mark.parametrize(
    "options,message",
    [({"n": 0}, "n must be"), ({"n": 129}, "n must be"), ({"n": 3, "best_of": 2}, "best_of")],
)
def test_bad_numbers_of_answers(options, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)
