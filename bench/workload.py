"""Requests to measure with: fixed seeds, lengths as of real traffic, prompts of real words."""

from dataclasses import dataclass

import numpy as np

from jpaged.text.tokenizer import Tokenizer

SEED = 0
TEXT = (
    "The old harbour town lay quiet in the morning light while fishermen mended their nets along "
    "the wall. A bell rang from the church on the hill, and children ran past the bakery with "
    "warm bread under their arms. Nobody noticed the small grey boat that came in with the tide, "
    "nor the woman who stepped ashore carrying nothing but a leather case full of maps. She asked "
    "the first man she met how far it was to the lighthouse, and he pointed across the water. "
)


@dataclass(frozen=True)
class Work:
    """One request: generate exactly `num_output_tokens` after the prompt."""

    prompt: list[int]
    num_output_tokens: int


def equal_work(
    tokenizer: Tokenizer, count: int, *, num_input_tokens: int, num_output_tokens: int
) -> list[Work]:
    inputs = [num_input_tokens] * count
    return [Work(prompt, num_output_tokens) for prompt in _prompts(tokenizer, inputs)]


def mixed_work(tokenizer: Tokenizer, count: int) -> list[Work]:
    """Make requests with the spread of chat traffic: many short, some many times longer."""
    random = np.random.default_rng(SEED)
    inputs = _lognormal(random, count, median=128, low=16, high=512)
    outputs = _lognormal(random, count, median=48, low=4, high=128)
    prompts = _prompts(tokenizer, inputs)
    return [Work(*pair) for pair in zip(prompts, outputs, strict=True)]


def _lognormal(
    random: np.random.Generator, count: int, *, median: int, low: int, high: int
) -> list[int]:
    lengths = random.lognormal(np.log(median), 0.8, count)
    return np.clip(lengths.round(), low, high).astype(int).tolist()


def _prompts(tokenizer: Tokenizer, lengths: list[int]) -> list[list[int]]:
    """Make prompts that each begin at another word, so that no two are equal."""
    words = TEXT.split(" ")
    prompts = []
    for number, length in enumerate(lengths):
        start = number % len(words)
        rotated = " ".join(words[start:] + words[:start])
        token_ids = tokenizer.encode(f"{number}. {rotated}", add_special_tokens=False)
        repeats = -(-length // len(token_ids))
        prompts.append((token_ids * repeats)[:length])
    return prompts
