"""Rotary frequencies against those of transformers. O-49."""

from typing import Any

import numpy as np
import pytest

from jpaged.errors import CheckpointError
from jpaged.models.config import ModelConfig
from jpaged.models.rope import (
    FrequencyFactors,
    Llama3Scaling,
    RopeConfig,
    attention_factor,
    inverse_frequencies,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3 as released": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    "yarn": YARN,
    "yarn, no attention factor": YARN | {"attention_factor": 1.0},
    "yarn, other ramp": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, ramp not rounded": YARN | {"truncate": False},
    "yarn, magnitudes": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, original length unknown": {"rope_type": "yarn", "factor": 4.0},
}


@pytest.mark.torch
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_are_those_of_transformers(name: str, head_dim: int, theta: float) -> None:
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf_config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=128,
        rope_parameters=PARAMETERS[name] | {"rope_theta": theta},
        architectures=["LlamaForCausalLM"],
    )
    rope = ModelConfig.from_hf(hf_config.to_dict()).rope
    expected = LlamaRotaryEmbedding(hf_config)
    ours = inverse_frequencies(rope, head_dim)
    assert ours.dtype == np.float32
    # Three roundings of float32: power functions differ in the last bit between libraries.
    np.testing.assert_allclose(ours, expected.inv_freq.numpy(), rtol=4e-7, atol=0)
    assert attention_factor(rope) == pytest.approx(expected.attention_scaling, rel=1e-12)


def test_yarn_attention_factor_follows_from_the_factor(hf_config: dict[str, Any]) -> None:
    """0.1 * ln(4) + 1."""
    rope = ModelConfig.from_hf(hf_config | {"rope_scaling": YARN}).rope
    assert attention_factor(rope) == pytest.approx(1.1386, abs=1e-4)


def test_linear_scaling_divides_all_frequencies(hf_config: dict[str, Any]) -> None:
    rope = ModelConfig.from_hf(hf_config | {"rope_scaling": PARAMETERS["linear"]}).rope
    plain = inverse_frequencies(RopeConfig(theta=10_000.0), 16)
    np.testing.assert_array_equal(inverse_frequencies(rope, 16), plain / 2)
    assert plain[0] == 1.0
    assert plain[4] == pytest.approx(0.01)


def test_factors_of_a_gguf_file_do_what_llama3_scaling_does() -> None:
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    llama3 = inverse_frequencies(RopeConfig(theta=1e4, scaling=scaling), 32)
    factors = inverse_frequencies(RopeConfig(theta=1e4), 32) / llama3
    assert len(set(factors.tolist())) > 3  # plain, scaled and blended ones
    rope = RopeConfig(theta=1e4, scaling=FrequencyFactors(factors=tuple(factors.tolist())))
    np.testing.assert_allclose(inverse_frequencies(rope, 32), llama3, rtol=2e-7)


def test_wrong_number_of_factors_is_refused() -> None:
    rope = RopeConfig(theta=1e4, scaling=FrequencyFactors(factors=(1.0, 2.0)))
    with pytest.raises(CheckpointError, match="rope has 2 frequency factors, but .* need 8"):
        inverse_frequencies(rope, 16)
