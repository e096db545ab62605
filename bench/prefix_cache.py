"""`jpaged bench prefix-cache`: what the prefix cache gains, and costs when nothing is found.

Long prompts and short answers, 16:1. A share of every prompt is the text of an earlier one. The
same work runs with the cache on and off, in turns, and the answers are compared.
"""

import time

import numpy as np

from jpaged.bench.options import ModelOptions
from jpaged.inputs import TokensPrompt
from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams

NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS = 512, 32
NUM_REQUESTS, NUM_TEXTS = 16, 4
NUM_ROUNDS = 3
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
FIRST_TOKENS = SamplingParams(temperature=0, max_tokens=1)


def bench_prefix_cache(options: ModelOptions) -> None:
    """Print requests a second with the cache on and off, for several shares of hits."""
    on, off = (
        LLM(
            options.model,
            max_model_len=1024,
            max_num_seqs=NUM_REQUESTS,
            enable_prefix_caching=cache,
        )
        for cache in (True, False)
    )
    print("hits    cache on  cache off  ratio (median of rounds)")
    for percentage in (0, 50, 75):
        seconds = [compare(on, off, percentage, seed) for seed in range(NUM_ROUNDS)]
        ratio = np.median([without / with_cache for with_cache, without in seconds])
        best = [NUM_REQUESTS / min(times) for times in zip(*seconds, strict=True)]
        print(
            f"{percentage:3} % {best[0]:8.2f} {best[1]:8.2f} requests/s {ratio:6.2f} x", flush=True
        )


def compare(on: LLM, off: LLM, percentage: int, seed: int) -> tuple[float, float]:
    """Time the same prompts with the cache and without it, the one or the other first."""
    texts, prompts = make_prompts(percentage, np.random.default_rng([percentage, seed]))
    seconds, answers = {}, {}
    for llm in (on, off) if seed % 2 else (off, on):
        llm.generate(texts, FIRST_TOKENS, use_tqdm=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        seconds[llm] = time.perf_counter() - started
        answers[llm] = [output.outputs[0].token_ids for output in outputs]
        hits = sum(output.num_cached_tokens for output in outputs)
        expected = percentage / 100 if llm is on else 0
        assert hits / (NUM_REQUESTS * NUM_INPUT_TOKENS) == expected, hits
    assert answers[on] == answers[off], "the cache changed an answer"
    return seconds[on], seconds[off]


def make_prompts(
    percentage: int, random: np.random.Generator
) -> tuple[list[TokensPrompt], list[TokensPrompt]]:
    """Make texts to compute beforehand, and prompts that begin with one of them."""
    num_shared = NUM_INPUT_TOKENS * percentage // 100

    def tokens(count: int) -> list[int]:
        return random.integers(1000, 20000, count).tolist()

    texts = [tokens(num_shared) for _ in range(NUM_TEXTS)]
    prompts = [
        texts[number % NUM_TEXTS] + tokens(NUM_INPUT_TOKENS - num_shared)
        for number in range(NUM_REQUESTS)
    ]
    known = texts if num_shared else [tokens(1) for _ in texts]
    return (
        [TokensPrompt(prompt_token_ids=[*text, 0]) for text in known],
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
    )
