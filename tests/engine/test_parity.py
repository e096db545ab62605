"""Greedy answers equal those of transformers, whatever the batch, block size or step budget."""

import json

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams
from tests.demo_engine import DEMO_OPTIONS
from tests.demo_prompts import DEMO_PROMPTS
from tests.hf_reference import assert_greedy_parity, hf_greedy, hf_greedy_along

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "grouped-queries": {},
    "one-kv-head-stored-head": {"num_key_value_heads": 1},
    "no-groups": {"num_key_value_heads": 4},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "odd-head-dim": {"head_dim": 20},
    "llama3-rope": {"rope_parameters": {"rope_theta": 10_000.0, **LLAMA3_ROPE}},
}
MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
# Of 24 tokens: no multiple of a block, and shorter than a tile of attention.
WINDOWED = {
    "mistral": {"family": "Mistral"},
    "ministral": {"family": "Ministral", **MIXED},
    # As the first Ministral was published: transformers takes such a Mistral for a Ministral.
    "mistral-with-layer-types": {"family": "Mistral", **MIXED},
}
NUM_TOKENS = 16
LONG_DEMO_SIZES = [(16, 512), (8, 64), (32, 16), (128, 64)]


def random_prompts(vocab_size: int, lengths: list[int]) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, vocab_size, length).tolist() for length in lengths]


def claim_tied_head(folder):
    """Let the config say that the head is the embedding, though the weights have another one."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def ours(llm, prompts, num_tokens=NUM_TOKENS):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    token_prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(token_prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_llama(variant, tiny_llama, hf_model, make_llm):
    """O-47, O-90 and friends: head_dim, groups, biases, tying and RoPE as the config says, but for
    a stored head where the config says tied."""
    folder = tiny_llama(**VARIANTS[variant])
    if variant.endswith("stored-head"):
        claim_tied_head(folder)
    # Longer than the rotary scaling's original length, and than a tile of attention.
    prompts = random_prompts(256, [1, 5, 16, 17, 33, 100, 150])
    expected = hf_greedy(hf_model(folder), prompts, NUM_TOKENS)
    llm = make_llm(folder, max_num_seqs=4)
    assert_greedy_parity(ours(llm, prompts), expected)
    assert_greedy_parity([ours(llm, [prompt])[0] for prompt in prompts], expected)


@pytest.mark.parametrize(
    "block_size,budget",
    [
        *[(8, 64), (16, 16), (128, 64)],
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in [(8, 16), (8, 512), (16, 64), (16, 512)]
            + [(32, 16), (32, 64), (32, 512), (128, 16), (128, 512)]
        ),
    ],
)
def test_block_sizes_and_budgets(block_size, budget, tiny_llama, hf_model, make_llm):
    """O-01: every row reads its own blocks in any order of rows. O-13: chunks change nothing."""
    folder = tiny_llama(max_position_embeddings=512)
    prompts = random_prompts(256, [5, 16, 17, 33, 300, 64, 1, 120])
    expected = hf_greedy(hf_model(folder), prompts, NUM_TOKENS)
    llm = make_llm(folder, block_size=block_size, max_num_batched_tokens=budget, max_num_seqs=4)
    assert_greedy_parity(ours(llm, prompts), expected)
    assert_greedy_parity(ours(llm, prompts[::-1]), expected[::-1])
    assert_greedy_parity([ours(llm, [prompt])[0] for prompt in prompts[:4]], expected[:4])


LONG_BUDGETS = (pytest.param(budget, marks=pytest.mark.long) for budget in (64, 299))


@pytest.mark.parametrize("budget", [17, 300, *LONG_BUDGETS])
def test_chunked_prefill_beside_decodes(budget, tiny_llama, hf_model, make_llm):
    """O-13: a long prompt in chunks, alone and while three others decode."""
    folder = tiny_llama(max_position_embeddings=512)
    prompts = random_prompts(256, [3, 9, 20, 300])
    expected = hf_greedy(hf_model(folder), prompts, NUM_TOKENS)
    llm = make_llm(folder, max_num_batched_tokens=budget, max_num_seqs=4)
    assert_greedy_parity(ours(llm, prompts[3:]), expected[3:])
    assert_greedy_parity(ours(llm, prompts), expected)


@pytest.mark.parametrize(
    "variant,budget",
    [
        ("mistral", 17),
        ("ministral", 17),
        ("mistral-with-layer-types", 64),
        pytest.param("mistral", 64, marks=pytest.mark.long),
    ],
)
def test_sliding_windows(variant, budget, tiny_llama, hf_model, make_llm):
    """Prompts around the window and far beyond it, in chunks shorter and longer than it."""
    folder = tiny_llama(sliding_window=24, **WINDOWED[variant])
    prompts = random_prompts(256, [5, 9, 23, 24, 25, 60, 150])
    expected = hf_greedy(hf_model(folder), prompts, NUM_TOKENS)
    llm = make_llm(folder, max_num_batched_tokens=budget, max_num_seqs=4)
    assert_greedy_parity(ours(llm, prompts), expected)
    assert_greedy_parity([ours(llm, [prompt])[0] for prompt in prompts], expected)


def test_demo_model(demo_model_path, demo_hf_model, make_llm):
    check_demo_model(demo_model_path, demo_hf_model, make_llm, num_prompts=8, num_tokens=20)


@pytest.mark.long
@pytest.mark.parametrize("block_size,budget", LONG_DEMO_SIZES)
def test_demo_model_with_other_sizes(block_size, budget, demo_model_path, demo_hf_model, make_llm):
    sizes = {"block_size": block_size, "max_num_batched_tokens": budget}
    check_demo_model(
        demo_model_path, demo_hf_model, make_llm, num_prompts=20, num_tokens=64, **sizes
    )


def check_demo_model(path, hf_model, make_llm, *, num_prompts, num_tokens, **sizes):
    """All prompts together, and a few alone."""
    llm = make_llm(path, **{**DEMO_OPTIONS, **sizes})
    prompts = [llm.tokenizer.encode(prompt) for prompt in DEMO_PROMPTS[:num_prompts]]
    for some in (prompts, prompts[:2], prompts[2:3]):
        answers = ours(llm, some, num_tokens)
        assert_greedy_parity(answers, hf_greedy_along(hf_model, some, answers))
