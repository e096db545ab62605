"""Which implementation of attention an engine takes, and that all give the same answers."""

import json
import re
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.execution.attention_choice import choose_attention, choose_block_size
from jpaged.sampling_params import SamplingParams
from jpaged.startup.model_files import load_model_config, resolve_model
from jpaged.target import Target, described_target
from tests.random_llama import save_random_llama

A100 = described_target("a100-80gb")
V100 = Target(platform="gpu", device_kind="Tesla V100-SXM2-16GB", compute_capability=(7, 0))
MI300 = Target(platform="gpu", device_kind="AMD Instinct MI300X")
CPU = described_target("cpu")
TPU = described_target("v5e")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with both kinds of layers; the window is shorter than most contexts."""
    return save_random_llama(
        tmp_path_factory.mktemp("random"),
        architectures=["MinistralForCausalLM"],
        model_type="ministral",
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=24,
    )


def answers(llm):
    """Twice, so that blocks are found again; prompts of which some begin alike."""
    prompts = [
        {"prompt_token_ids": [(start + 7 * index) % 200 for index in range(length)]}
        for length, start in [(75, 3), (20, 3), (1, 9), (50, 4), (64, 3), (33, 5)]
    ]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = [output for _ in range(2) for output in llm.generate(prompts, params)]
    llm.engine.core.scheduler.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "pallas-tpu"])
def test_kernels_answer_as_xla_does(backend, folder, make_llm):
    """With and without a window, the prefix cache on, prompts in chunks, and too few blocks for
    all requests."""
    expected = answers(make_llm(folder, max_num_batched_tokens=64))
    llm = make_llm(
        folder, attention_backend=backend, max_num_batched_tokens=64, num_gpu_blocks_override=9
    )
    before = num_preemptions(llm)
    assert answers(llm) == expected
    assert num_preemptions(llm) > before


def num_preemptions(llm) -> float:
    rendered = llm.engine.core.metrics.render()[0].decode()
    [value] = re.findall(r"^jpaged:num_preemptions_total\{.*\} (.*)$", rendered, re.M)
    return float(value)


@pytest.fixture(scope="module")
def choose(folder):
    tiny = load_model_config(resolve_model(str(folder)))

    def choosing(
        device, *, backend="auto", dtype="bfloat16", head_dim=128, block_size=16, tuning_file=None
    ):
        model = replace(tiny, head_dim=head_dim)
        config = EngineConfig(
            attention_backend=backend, block_size=block_size, tuning_file=tuning_file
        )
        return choose_attention(config, model, jnp.dtype(dtype), device)

    return choosing


def test_each_device_has_its_backend(choose):
    assert choose(A100).name == "triton"
    assert choose(A100, backend="xla").name == "xla"
    assert choose(V100, backend="xla").name == "xla"
    assert choose(TPU).name == "pallas-tpu"
    assert choose(TPU, backend="xla").name == "xla"
    assert choose(CPU).name == "xla"


def test_only_a_cpu_interprets_kernels(choose):
    assert not choose(A100).interpret
    assert not choose(TPU).interpret
    assert choose(CPU, backend="triton").interpret
    assert choose(CPU, backend="pallas-tpu").interpret


@pytest.mark.parametrize(
    "device,options,reason",
    [
        (V100, {}, "compute capability 7.0, and 8.0"),
        (MI300, {}, "NVIDIA cards only"),
        (TPU, {"backend": "triton"}, "NVIDIA cards only"),
        (A100, {"head_dim": 512}, "head_dim is 512, and at most 256"),
        (A100, {"dtype": "float8_e4m3fn"}, "cannot convert float8_e4m3fn"),
        (A100, {"dtype": "uint8"}, "of type uint8, and float32, "),
        (A100, {"backend": "pallas-tpu"}, "means 'pallas-tpu' here, but its kernels run on TPUs"),
        (MI300, {"backend": "pallas-tpu"}, "TPUs only"),
        (TPU, {"head_dim": 512}, "head_dim is 512, and at most 256"),
        (TPU, {"dtype": "float16"}, "of type float16, and float32, bfloat16"),
        (TPU, {"block_size": 8}, "block_size is 8, and bfloat16 needs a multiple of 16"),
    ],
)
def test_what_kernels_cannot_do_is_refused(choose, device, options, reason):
    """O-62: no slower path is taken unasked."""
    with pytest.raises(ConfigError, match=f"{reason}.*Set attention_backend to 'xla'"):
        choose(device, **options)


@pytest.mark.parametrize(
    "kind,fetch_bytes",
    [("TPU v4", 2 << 20), ("TPU v5 lite", 4 << 20), ("TPU v5", 8 << 20), ("TPU v6 lite", 8 << 20)],
)
def test_each_chip_has_its_sizes(choose, kind, fetch_bytes):
    attention = choose(Target(platform="tpu", device_kind=kind))
    assert attention.sizes(jnp.dtype("bfloat16")).fetch_bytes == fetch_bytes
    assert attention.vmem_limit > 2 * fetch_bytes


@pytest.fixture
def tuning_file(tmp_path):
    """With an entry for the tiny model on TPUs."""

    def write(**sizes):
        key = dict(device="TPU v5 lite", backend="pallas-tpu", num_kv_heads=2, group=2)
        key |= dict(head_dim=128, pool_dtype="bfloat16", block_size=16)
        sizes = dict(fetch_bytes=1 << 20, chunk_tokens=256, prefill_queries=32) | sizes
        path = tmp_path / "sizes.json"
        path.write_text(json.dumps([{**key, "sizes": sizes}]))
        return str(path)

    return write


def test_measured_sizes_come_from_a_file(choose, tuning_file):
    path, bfloat16 = tuning_file(), jnp.dtype("bfloat16")
    assert choose(TPU, tuning_file=path).sizes(bfloat16).chunk_tokens == 256
    assert choose(TPU, tuning_file=path, block_size=32).measured is None
    assert choose(A100, tuning_file=path).measured is None
    assert choose(TPU).measured is None


def test_files_that_cannot_be_used_are_refused(choose, tuning_file, tmp_path):
    with pytest.raises(ConfigError, match="sizes.json, entry 1, sizes: chunk_tokens is 7, and 16"):
        choose(TPU, tuning_file=tuning_file(chunk_tokens=7))
    refused = "sizes.json, entry of device TPU v5 lite, .*take .* MiB of the chip's vector memory"
    with pytest.raises(ConfigError, match=f"{refused} with fetch_bytes 33554432, .*remove it"):
        choose(TPU, tuning_file=tuning_file(fetch_bytes=32 << 20))
    with pytest.raises(ConfigError, match="none.json: No such file"):
        choose(TPU, tuning_file=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="tuning_file is .*'auto' means 'xla' here"):
        choose(CPU, tuning_file=tuning_file())


@pytest.mark.parametrize(
    "device,num_kv_heads,dtype,block_size",
    [
        (A100, 1, "bfloat16", 16),
        (TPU, 8, "bfloat16", 16),
        (TPU, 1, "bfloat16", 128),
        (TPU, 1, "int8", 256),
        (TPU, 32, "int8", 32),
        (CPU, 1, "float32", 16),
    ],
)
def test_block_size_suits_the_device(folder, device, num_kv_heads, dtype, block_size):
    """On TPUs, a copy of a block should take longer than to start it."""
    tiny = load_model_config(resolve_model(str(folder)))
    model = replace(tiny, num_heads=32, num_kv_heads=num_kv_heads, head_dim=128)
    attention = choose_attention(EngineConfig(), model, jnp.dtype(dtype), device)
    assert choose_block_size(EngineConfig(), attention, model, jnp.dtype(dtype)) == block_size
    config = EngineConfig(block_size=64)
    assert choose_block_size(config, attention, model, jnp.dtype(dtype)) == 64


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_xla_refuses_what_it_would_do_badly(choose, dtype):
    """Measured: six times the pool's size in temporary memory."""
    with pytest.raises(ConfigError, match=f"widen the whole {dtype} pool.*int8 is possible"):
        choose(CPU, dtype=dtype)
    assert choose(CPU, dtype="int8").name == choose(A100, backend="xla", dtype=dtype).name == "xla"
