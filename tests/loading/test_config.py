"""What ModelConfig reads out of config.json and generation_config.json."""

from typing import Any

import pytest

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.models.config import ModelConfig
from jpaged.models.rope import LinearScaling, Llama3Scaling, YarnScaling

Config = dict[str, Any]


def test_reads_every_field(hf_config: Config) -> None:
    config = ModelConfig.from_hf(hf_config)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (51, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.rms_norm_eps) == (16, 1e-5)
    assert config.max_position_embeddings == 128
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert (config.rope.theta, config.rope.scaling) == (10000.0, None)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert hash(config) == hash(ModelConfig.from_hf(hf_config))


def test_defaults_are_those_of_llama(hf_config: Config) -> None:
    optional = ("num_key_value_heads", "tie_word_embeddings", "attention_bias", "mlp_bias")
    for key in (
        *optional,
        "rope_theta",
        "rope_scaling",
        "bos_token_id",
        "eos_token_id",
        "head_dim",
    ):
        del hf_config[key]
    config = ModelConfig.from_hf(hf_config)
    assert config.num_kv_heads == config.num_heads
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert (config.rope.theta, config.bos_token_id, config.eos_token_ids) == (10000.0, None, ())


@pytest.mark.parametrize(
    ("sizes", "head_dim"),
    [
        ({"head_dim": None}, 16),
        ({"head_dim": 32}, 32),
        ({"hidden_size": 60, "num_attention_heads": 8, "head_dim": 16}, 16),
        ({"hidden_size": 640, "num_attention_heads": 4, "head_dim": 256}, 256),
    ],
)
def test_head_dim_is_taken_from_the_config(hf_config: Config, sizes: Config, head_dim: int) -> None:
    """O-47."""
    assert ModelConfig.from_hf(hf_config | sizes).head_dim == head_dim


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_theta": 5000.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ],
)
def test_rope_scaling_is_found_under_each_spelling(hf_config: Config, spelling: Config) -> None:
    """O-49."""
    del hf_config["rope_scaling"], hf_config["rope_theta"]
    rope = ModelConfig.from_hf(hf_config | spelling).rope
    assert (rope.theta, rope.scaling) == (5000.0, LinearScaling(factor=2.0))


def test_rope_lengths_are_found_where_configs_have_them(hf_config: Config) -> None:
    """O-49: inside the scaling, beside it, or nowhere."""
    yarn = {"rope_type": "yarn", "factor": 4.0}

    def original_length(**keys: Any) -> int:
        scaling = ModelConfig.from_hf(hf_config | keys).rope.scaling
        assert isinstance(scaling, YarnScaling)
        return scaling.original_max_position_embeddings

    assert original_length(rope_scaling=yarn) == 128
    assert original_length(rope_scaling=yarn | {"original_max_position_embeddings": 32}) == 32
    assert original_length(rope_scaling=yarn, original_max_position_embeddings=64) == 64
    llama3 = ModelConfig.from_hf(hf_config | {"rope_scaling": LLAMA3 | {"rope_type": "llama3"}})
    assert llama3.rope.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    )


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        (None, (2,)),
        ({}, (2,)),
        ({"temperature": 0.5}, (2,)),
        ({"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": None}, ()),
    ],
)
def test_generation_config_wins_for_eos(
    hf_config: Config, generation_config: Config | None, expected: tuple[int, ...]
) -> None:
    """O-52, parsing."""
    assert ModelConfig.from_hf(hf_config, generation_config).eos_token_ids == expected


def test_config_itself_may_list_eos_tokens(hf_config: Config) -> None:
    """O-52, parsing."""
    config = ModelConfig.from_hf(hf_config | {"eos_token_id": [7, 8, 9]})
    assert config.eos_token_ids == (7, 8, 9)


REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(hf_config: Config, key: str) -> None:
    del hf_config[key]
    with pytest.raises(CheckpointError, match=rf"^config.json has no {key}$"):
        ModelConfig.from_hf(hf_config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architectures", None, "architectures in config.json must be a list with one class name"),
        ("architectures", [], r"must be a list with one class name, got \[\]"),
        ("vocab_size", 0, "vocab_size in config.json must be an integer of at least 1, got 0"),
        (
            "hidden_size",
            "64",
            "hidden_size in config.json must be an integer of at least 1, got '64'",
        ),
        ("num_hidden_layers", True, "num_hidden_layers in config.json must be an integer"),
        ("num_key_value_heads", 3, r"num_attention_heads \(4\) .* multiple of .* \(3\)"),
        ("head_dim", 15, "head_dim of config.json must be even, got 15"),
        ("rms_norm_eps", 0, "rms_norm_eps in config.json must be a number above 0, got 0"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps in config.json must be a number above 0"),
        ("tie_word_embeddings", "no", "tie_word_embeddings .* must be true or false, got 'no'"),
        ("rope_theta", -1, "rope_theta in config.json must be a number above 0, got -1"),
        ("rope_scaling", "linear", "rope_scaling in config.json must be a JSON object"),
        ("rope_scaling", {"type": "linear"}, "rope_scaling in config.json has no factor"),
        (
            "rope_scaling",
            {"type": 3},
            "type in rope_scaling in config.json must be a string, got 3",
        ),
        (
            "rope_scaling",
            LLAMA3 | {"rope_type": "llama3", "low_freq_factor": 4.0},
            r"low_freq_factor \(4.0\) .* must be below high_freq_factor \(4.0\)",
        ),
        ("eos_token_id", -1, "eos_token_id in config.json must be a token id or a list"),
        ("eos_token_id", ["2"], "eos_token_id in config.json must be a token id or a list"),
        ("bos_token_id", 1.5, "bos_token_id in config.json must be an integer of at least 0"),
    ],
)
def test_impossible_value_is_named(hf_config: Config, key: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(hf_config | {key: value})


def test_hidden_size_must_divide_where_there_is_no_head_dim(hf_config: Config) -> None:
    with pytest.raises(CheckpointError, match=r"hidden_size \(66\) is no multiple"):
        ModelConfig.from_hf(hf_config | {"hidden_size": 66, "head_dim": None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "gptq"}),
        ("pretraining_tp", 2),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 4096),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("attn_logit_softcapping", 30.0),
        ("num_local_experts", 8),
    ],
)
def test_unsupported_variant_is_refused_by_name(hf_config: Config, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^{key} in config.json is .*not supported"):
        ModelConfig.from_hf(hf_config | {key: value})


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "magic"])
def test_unsupported_rope_type_is_refused_by_name(hf_config: Config, rope_type: str) -> None:
    """O-49."""
    scaling = {"rope_type": rope_type, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match=f"rope_type '{rope_type}' .* linear, llama3"):
        ModelConfig.from_hf(hf_config | {"rope_scaling": scaling})


@pytest.mark.parametrize(
    "keys",
    [
        {"hidden_act": "swish"},
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"]},
        {"partial_rotary_factor": 1.0},
        {"quantization_config": None},
    ],
)
def test_variants_that_change_nothing_are_accepted(hf_config: Config, keys: Config) -> None:
    assert ModelConfig.from_hf(hf_config | keys) == ModelConfig.from_hf(hf_config)
