"""What ModelConfig reads out of config.json and generation_config.json."""

from typing import Any

import pytest
from transformers import MinistralConfig, MistralConfig

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
    assert config.windows == (None, None)
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
        ("eos_token_id", [2, 51], "eos_token_id in config.json has the token id 51, .* ends at 50"),
        ("eos_token_id", ["2"], "eos_token_id in config.json must be a token id or a list"),
        ("layer_types", "full_attention", "layer_types in config.json must be a list of strings"),
        (
            "layer_types",
            ["full_attention"],
            r"one entry for each of num_hidden_layers \(2\), got 1",
        ),
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
        ("layer_types", ["chunked_attention", "full_attention"]),
        ("attention_chunk_size", 8192),
        ("per_layer_config", {"1": {"sliding_window": 8}}),
        ("attn_logit_softcapping", 30.0),
        ("num_local_experts", 8),
    ],
)
def test_unsupported_variant_is_refused_by_name(hf_config: Config, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^{key} in config.json is .*not supported"):
        ModelConfig.from_hf(hf_config | {key: value})


THEIR_CONFIGS = {"MistralForCausalLM": MistralConfig, "MinistralForCausalLM": MinistralConfig}
SLIDING_FIRST = {"layer_types": ["sliding_attention", "full_attention"]}


def windowed(hf_config: Config, architecture: str, **keys: Any) -> Config:
    return hf_config | {"architectures": [architecture], "sliding_window": 24} | keys


@pytest.mark.parametrize("architecture", THEIR_CONFIGS)
@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, (24, 24)),
        ({"use_sliding_window": True, "layer_types": None}, (24, 24)),
        ({"sliding_window": None}, (None, None)),
        (SLIDING_FIRST, (24, None)),
        ({"layer_types": ["full_attention", "full_attention"]}, (None, None)),
        ({"sliding_window": None, "use_sliding_window": False}, (None, None)),
    ],
)
def test_windows_of_layers(
    hf_config: Config, architecture: str, keys: Config, windows: tuple[int | None, ...]
) -> None:
    config = ModelConfig.from_hf(windowed(hf_config, architecture, **keys))
    assert (config.architecture, config.windows) == (architecture, windows)


@pytest.mark.parametrize("architecture", THEIR_CONFIGS)
def test_absent_keys_have_the_defaults_of_transformers(
    hf_config: Config, architecture: str
) -> None:
    theirs = THEIR_CONFIGS[architecture]()
    config = windowed(hf_config, architecture, num_attention_heads=16, hidden_size=256)
    optional = ("num_key_value_heads", "sliding_window", "rope_theta", "tie_word_embeddings")
    for key in (*optional, "attention_bias", "mlp_bias"):
        del config[key]
    ours = ModelConfig.from_hf(config)
    assert ours.num_kv_heads == theirs.num_key_value_heads == 8
    assert ours.windows == (theirs.sliding_window,) * 2 == (4096, 4096)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert not (ours.attention_bias or ours.mlp_bias)
    assert ModelConfig.from_hf(config | {"num_key_value_heads": None}).num_kv_heads == 16


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            UnsupportedModelError,
            "layer_types in config.json is 'chunked_attention', .*'full_attention' or 'sliding_at",
        ),
        (
            {"use_sliding_window": False},
            UnsupportedModelError,
            "use_sliding_window in config.json is False, which is not supported",
        ),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias in config.json is True"),
        ({"mlp_bias": True}, UnsupportedModelError, "mlp_bias in config.json is True"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}, "rope_scaling": None},
            UnsupportedModelError,
            "sliding_attention in rope_parameters in config.json is {'rope_theta'",
        ),
        ({"sliding_window": None} | SLIDING_FIRST, CheckpointError, "json has no sliding_window$"),
        ({"sliding_window": 0}, CheckpointError, "sliding_window .* integer of at least 1, got 0"),
        ({"sliding_window": "8"}, CheckpointError, "sliding_window .* of at least 1, got '8'"),
    ],
)
def test_windows_that_are_refused(
    hf_config: Config, keys: Config, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ModelConfig.from_hf(windowed(hf_config, "MistralForCausalLM", **keys))


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
