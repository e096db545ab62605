"""KV caches of one byte a number: how many blocks fit, where scales come from, what answers do."""

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.errors import ConfigError
from jpaged.execution.kv_cache import kv_cache_spec
from jpaged.execution.kv_scales import calibration_tokens, largest_values, with_kv_scales
from jpaged.execution.programs import lower_copy, lower_forward, lower_swap_in
from jpaged.sampling_params import SamplingParams
from jpaged.startup.memory_plan import fit_pool
from pallas_kernels.paged_attention import TritonPagedAttention
from tests.demo_engine import DEMO_OPTIONS
from tests.demo_prompts import DEMO_PROMPTS
from tests.random_llama import save_random_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_llama(tmp_path_factory.mktemp("random"))


def spec_of(llm):
    return llm.engine.core._runner.spec


def answers(llm, *, n=1, alone=False, num_tokens=40):
    """Twice, so that blocks are found again; prompts of which some begin alike."""
    prompts = [
        {"prompt_token_ids": [(start + 7 * index) % 200 for index in range(length)]}
        for length, start in [(75, 3), (20, 3), (1, 9), (50, 4), (64, 3), (33, 5)]
    ]
    params = SamplingParams(n=n, temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    batches = [[prompt] for prompt in prompts] if alone else [prompts, prompts]
    outputs = [output for batch in batches for output in llm.generate(batch, params)]
    llm.engine.core.scheduler.check_integrity()
    token_ids = [output.outputs[0].token_ids for output in outputs]
    assert token_ids[len(prompts) :] in ([], token_ids[: len(prompts)])
    return token_ids[: len(prompts)]


@pytest.mark.slow
def test_kernels_answer_as_xla_does(folder, make_llm):
    expected = answers(make_llm(folder, kv_cache_dtype="int8"), num_tokens=12)
    llm = make_llm(folder, kv_cache_dtype="int8", attention_backend="triton")
    assert spec_of(llm).attention.name == "triton"
    assert answers(llm, num_tokens=12) == expected


@pytest.mark.slow
def test_float8_in_kernels(folder, make_llm):
    """The same answers from the cache, and alone."""
    llm = make_llm(folder, kv_cache_dtype="float8_e5m2", attention_backend="triton")
    assert answers(llm, num_tokens=12) == answers(llm, num_tokens=12, alone=True)
    assert llm.engine.core._runner.executor.pools[0].dtype == jnp.float8_e5m2


@pytest.mark.parametrize("kv_cache_dtype", [pytest.param("auto", marks=pytest.mark.long), "int8"])
def test_as_many_more_blocks_fit(folder, make_llm, kv_cache_dtype):
    llm = make_llm(
        folder,
        kv_cache_dtype=kv_cache_dtype,
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=2**17,
    )
    spec = spec_of(llm)
    block = 2 * 16 * 2 * 2 * 16  # layers, tokens, K and V, KV heads, head_dim
    itemsize = 4 if kv_cache_dtype == "auto" else 1
    assert spec.kv_cache.num_blocks == min(2**17 // (block * itemsize) - 1, 8 * 256 // 16)
    pools = llm.engine.core._runner.executor.pools
    assert {pool.dtype.itemsize for pool in pools} == {itemsize}
    assert sum(pool.nbytes for pool in pools) <= 2**17


def test_scales_hold_what_the_model_writes(folder, make_llm):
    """Few numbers are cut off, and the range is used."""
    llm = make_llm(folder, kv_cache_dtype="int8")
    answers(llm)
    for pool in llm.engine.core._runner.executor.pools:
        stored = np.abs(np.asarray(pool[1:], np.int32))
        assert np.mean(stored[stored > 0] == 127) < 1e-3
        assert stored.max() > 90


def test_scales_are_parameters(folder, make_llm):
    """One program serves whatever the scales are; types with exponents have none."""
    with_scales, without = (
        spec_of(make_llm(folder, kv_cache_dtype=each)) for each in ("int8", "auto")
    )
    config = without.model.config
    for dtype in ("float8_e5m2", "float8_e4m3fn", "bfloat16"):
        assert with_kv_scales(without.model, jnp.dtype(dtype)) is without.model
    num_params = [len(spec.model.params) for spec in (with_scales, without)]
    assert num_params[0] == num_params[1] + config.num_layers
    changed = without.model.with_kv_scales([jnp.full(4, 0.5)] * config.num_layers)
    assert changed.graph == with_scales.model.graph
    assert changed.treedef == with_scales.model.treedef
    tokens = calibration_tokens(config.vocab_size, config.max_position_embeddings)
    again = [largest_values(without.model, tokens) for _ in range(2)]
    np.testing.assert_array_equal(*again)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["decode", "mixed", "copy", "swap in"])
def test_programs_convert_only_what_they_read(folder, make_llm, program):
    """No program holds another pool, or one of wider numbers."""
    spec = spec_of(make_llm(folder, kv_cache_dtype="int8", num_gpu_blocks_override=2000))
    compiled = {
        "decode": lambda: lower_forward(spec, spec.forward_shape(8, decode_only=True)),
        "mixed": lambda: lower_forward(spec, spec.forward_shape(8, decode_only=False)),
        "copy": lambda: lower_copy(spec, 4),
        "swap in": lambda: lower_swap_in(spec, 4),
    }[program]().compile()
    pool_bytes = int(np.prod(spec.kv_cache.layer_shape))
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= pool_bytes * spec.kv_cache.num_layers
    assert analysis.temp_size_in_bytes < pool_bytes


def test_pools_too_large_for_a_backend(folder, make_llm):
    """Pools of one byte a number do not work between 2 and 4 GiB in the kernels."""
    model = spec_of(make_llm(folder)).model.config
    attention = TritonPagedAttention(group=2, head_dim=16)
    block = 16 * 2 * 2 * 16

    def fit(num_bytes, dtype="int8", **options):
        num_blocks = num_bytes // block - 1
        spec = kv_cache_spec(
            model, attention, jnp.dtype(dtype), num_blocks=num_blocks, block_size=16
        )
        return fit_pool(EngineConfig(**options), attention, spec), num_blocks

    for num_bytes, dtype in [(2**31, "int8"), (2**32 + block, "int8"), (2**32, "bfloat16")]:
        fitting, wanted = fit(num_bytes, dtype)
        assert fitting == wanted
    assert fit(2**31 + block)[0] == fit(2**32)[0] == 2**31 // block - 1
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override .* at most 2097151\."):
        fit(2**32, num_gpu_blocks_override=2**32 // block - 1)


@pytest.mark.long
def test_demo_model_agrees(demo_model_path, make_llm):
    """20 prompts, 64 greedy tokens each of a float32 cache; the other cache's most likely token
    at each of these places, after the same tokens."""
    options = {**DEMO_OPTIONS, "enable_prefix_caching": False}
    exact = make_llm(demo_model_path, **options)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = exact.generate(DEMO_PROMPTS, params, use_tqdm=False)
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    llm = make_llm(demo_model_path, kv_cache_dtype="int8", **options)
    scored = llm.generate(
        [{"prompt_token_ids": text} for text in texts],
        SamplingParams(max_tokens=0, prompt_logprobs=1),
        use_tqdm=False,
    )
    agree = [
        entry.top[0][0] == token
        for text, output in zip(texts, scored, strict=True)
        for entry, token in zip(output.prompt_logprobs[-64:], text[-64:], strict=True)
    ]
    assert len(agree) == 20 * 64
    assert np.mean(agree) >= 0.95
