"""A model and its KV cache split over devices: answers of one device, on a share of the memory."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.stages import Compiled

from jpaged import LLM, BeamSearchParams, SamplingParams
from jpaged.errors import ConfigError
from jpaged.outputs import RequestOutput
from tests.random_llama import save_random_llama

VOCAB_SIZE = 259  # that of the byte tokenizer: a prime number plus two, divisible by no power of 2
PROMPTS = [[1, 2, 3, 4, 5] * 5, [7, 8], [1, 2, 3, 4, 5] * 4 + [6]]


@dataclass(frozen=True)
class Case:
    """num_devices: T of --tensor-parallel-size. options: of the engine."""

    num_devices: int
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "more KV heads than devices, preempted by swap": Case(
        2,
        {
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
        {"num_gpu_blocks_override": 11, "preemption_mode": "swap", "swap_space": 0.01},
    ),
    "fewer KV heads, preempted by recompute": Case(
        4,
        {"num_key_value_heads": 2, "sliding_window": 12, "architectures": ["MistralForCausalLM"]},
        {"num_gpu_blocks_override": 11, "preemption_mode": "recompute"},
    ),
    "as many KV heads, int8": Case(
        8,
        {"num_key_value_heads": 8, "intermediate_size": 256},
        {"kv_cache_dtype": "int8", "num_gpu_blocks_override": 500},
    ),
}
NAMES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def save_model(folder: Path, config: dict[str, Any]) -> Path:
    values = {"hidden_size": 64, "num_attention_heads": 8, **config}
    return save_random_llama(folder, **values)


def load(folder: Path, num_devices: int, **options: Any) -> LLM:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "bucket_growth": 4}
    limits |= {"block_size": 8, "num_gpu_blocks_override": 60, "max_model_len": 64}
    limits |= {"compilation_cache_dir": str(folder.parent / "programs")}
    return LLM(str(folder), tensor_parallel_size=num_devices, **(limits | options))


def answers(llm: LLM) -> list[RequestOutput]:
    """Greedy, seeded, several and beams; the second prompts find the first ones' in the cache."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    common = {"max_tokens": 20, "ignore_eos": True, "logprobs": 3}
    greedy = SamplingParams(temperature=0, prompt_logprobs=2, **common)
    drawn = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=5, n=3, **common)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    outputs += llm.generate(prompts, drawn, use_tqdm=False)
    return outputs + llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8))


def numbers_of(outputs: list[RequestOutput]) -> list[float]:
    """All log-probabilities, in order."""
    values: list[float] = []
    for output in outputs:
        scored = [each for each in output.prompt_logprobs or () if each is not None]
        for each in scored + [token for one in output.outputs for token in one.logprobs or ()]:
            values += [each.logprob, *(logprob for _, logprob in each.top)]
        values += [one.cumulative_logprob or 0.0 for one in output.outputs]
    return values


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tensor_parallelism(case: Case, tmp_path: Path) -> None:
    """All that the engines of a case show: to make them takes longer than to look."""
    folder = save_model(tmp_path / "model", case.config)
    alone, split = (load(folder, count, **case.options) for count in (1, case.num_devices))
    check_answers(answers(alone), answers(split))
    is_preempted = "preemption_mode" in case.options
    assert is_preempted == (num_preemptions(alone) > 0) == (num_preemptions(split) > 0)
    check_share_of_a_device(alone, split, case)
    check_what_devices_exchange(split)


def check_answers(alone: list[RequestOutput], split: list[RequestOutput]) -> None:
    expected, ids = (
        [[one.token_ids for one in output.outputs] for output in outputs]
        for outputs in (alone, split)
    )
    assert ids == expected
    np.testing.assert_allclose(numbers_of(split), numbers_of(alone), atol=1e-4)


def num_preemptions(llm: LLM) -> float:
    rendered = llm.engine.core.metrics.render()[0].decode()
    [value] = re.findall(r"^jpaged:num_preemptions_total\{.*\} (\S+)$", rendered, re.MULTILINE)
    return float(value)


def check_share_of_a_device(alone: LLM, split: LLM, case: Case) -> None:
    """O-106: what all devices hold together is what one would hold."""
    whole, part = (bytes_of_a_device(llm) for llm in (alone, split))
    if case.config["num_key_value_heads"] >= case.num_devices:  # else they are copied
        assert part == pytest.approx(whole / case.num_devices, rel=0.05)


def bytes_of_a_device(llm: LLM) -> int:
    """Of weights and pools: the same on all devices, and what the memory was planned with."""
    runner = llm.engine.core._runner
    sizes = Counter()
    for array in (*runner.spec.model.params, *runner.executor.pools):
        for shard in array.addressable_shards:
            sizes[shard.device] += shard.data.nbytes
    [num_bytes] = set(sizes.values())
    assert len(sizes) == runner.spec.target.num_devices
    cache = runner.spec.kv_cache
    assert num_bytes == runner.spec.model.num_bytes + (cache.num_blocks + 1) * cache.block_bytes
    return num_bytes


def check_what_devices_exchange(split: LLM) -> None:
    """Two sums a layer and one for the embedding; nothing to move blocks. No pool is copied."""
    runner = split.engine.core._runner
    num_sums = 2 * runner.spec.model.config.num_layers + 1
    cache = runner.spec.kv_cache
    for program in runner.executor.programs.forward.values():
        assert collectives(program) == {"all-reduce": num_sums}
        if cache.num_blocks >= 500:
            pool_bytes = cache.num_blocks * cache.block_bytes // cache.num_layers
            assert program.memory_analysis().temp_size_in_bytes < pool_bytes
    for programs in (
        runner.executor.programs.copy,
        runner.executor.programs.swap_out,
        runner.executor.programs.swap_in,
    ):
        assert not any(map(collectives, programs.values()))


def collectives(program: Compiled) -> Counter[str]:
    return Counter(re.findall(rf" ({NAMES})(?:-start)?\(", program.as_text() or ""))


@pytest.mark.parametrize(
    ("num_devices", "config", "message"),
    [
        (0, {}, "tensor_parallel_size must be at least 1, got 0"),
        (16, {}, r"tensor_parallel_size is 16, but JAX finds only 8 of its devices"),
        (3, {}, "tensor_parallel_size is 3, which does not divide .*num_attention_heads 8"),
        (8, {"num_attention_heads": 24, "num_key_value_heads": 3}, "num_key_value_heads 3"),
    ],
)
def test_what_cannot_be_split_is_refused(
    num_devices: int, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Before weights are read: there are none."""
    folder = save_model(tmp_path / "model", config)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=message):
        load(folder, num_devices)
