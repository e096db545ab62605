"""Weights and configs in GGUF files, against the models and libraries they were written with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.models.config import ModelConfig
from jpaged.models.formats.gguf_config import gguf_model_config
from jpaged.models.formats.gguf_file import GgufFile
from jpaged.models.formats.gguf_source import QUANTISED_TYPES, GgufSource
from jpaged.models.rope import inverse_frequencies
from tests.loading.llama_gguf import finish, write_llama_gguf

pytestmark = pytest.mark.smoke

Change = Callable[[gguf.GGUFWriter], None]


def open_source(path: Path) -> GgufSource:
    file = GgufFile(path)
    return GgufSource(file, gguf_model_config(file))


@pytest.mark.torch
@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"num_key_value_heads": 1},
    ],
)
def test_converted_llama_is_read_back(
    make_llama: Callable[..., Any], tmp_path: Path, overrides: dict[str, Any], type_name: str
) -> None:
    """O-45: names, shapes and the order of the rows of q and k are those of transformers."""
    model = make_llama(**overrides)
    tensor_type = GGMLQuantizationType[type_name]
    source = open_source(write_llama_gguf(tmp_path / "x.gguf", model, tensor_type=tensor_type))
    expected = model.state_dict()
    if overrides.get("tie_word_embeddings"):
        del expected["lm_head.weight"]
    assert set(source.names()) == set(expected)
    stored = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[type_name]
    for name, tensor in expected.items():
        values = source.read(name)
        assert values.shape == source.shape(name) == tuple(tensor.shape)
        assert values.dtype == (stored if values.ndim == 2 else np.float32)
        np.testing.assert_array_equal(values, tensor.numpy().astype(values.dtype), err_msg=name)
        assert source.location(name) == "x.gguf"


@pytest.mark.torch
def test_quantised_llama_is_close(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    """O-54: rows of q and k are put in order after they are de-quantised."""
    model = make_llama()
    q8 = GGMLQuantizationType.Q8_0
    source = open_source(write_llama_gguf(tmp_path / "x.gguf", model, tensor_type=q8))
    for name, tensor in model.state_dict().items():
        limit = np.abs(tensor.numpy()).max() / 127
        values = source.read(name)
        np.testing.assert_allclose(values, tensor.numpy(), rtol=0, atol=limit)
        # Parts begin and end within a head and within a block of numbers.
        part = values[5:23] if values.ndim == 1 else values[5:23, 3:41]
        read = source.read(name, slice(5, 23), slice(3, 41))
        np.testing.assert_array_equal(read, part, err_msg=name)


@pytest.mark.torch
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
)
def test_config_is_that_of_the_converted_model(
    make_llama: Callable[..., Any], tmp_path: Path, overrides: dict[str, Any]
) -> None:
    model = make_llama(rms_norm_eps=2.0**-17, **overrides)  # a number that float32 can hold
    expected = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    path = write_llama_gguf(tmp_path / "x.gguf", model)
    assert gguf_model_config(GgufFile(path)) == ModelConfig.from_hf(expected)


def raw_blocks(tensor_type: GGMLQuantizationType, shape: tuple[int, int]) -> np.ndarray:
    """Random blocks of types that gguf-py cannot quantise to; their float16 scales are sane."""
    scales_at = {
        GGMLQuantizationType.Q2_K: (80, 82),
        GGMLQuantizationType.Q3_K: (108,),
        GGMLQuantizationType.Q4_K: (0, 2),
        GGMLQuantizationType.Q5_K: (0, 2),
        GGMLQuantizationType.Q6_K: (208,),
    }
    block_size, bytes_per_block = GGML_QUANT_SIZES[tensor_type]
    rng = np.random.default_rng(tensor_type.value)
    num_blocks = shape[0] * shape[1] // block_size
    blocks = rng.integers(0, 256, (num_blocks, bytes_per_block), dtype=np.uint8)
    for position in scales_at[tensor_type]:
        scales = rng.uniform(0.01, 0.1, (num_blocks, 1)).astype(np.float16)
        blocks[:, position : position + 2] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def stored_bytes(tensor_type: GGMLQuantizationType, shape: tuple[int, int]) -> np.ndarray:
    if tensor_type.name.endswith("_K"):
        return raw_blocks(tensor_type, shape)
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return gguf.quants.quantize(values, tensor_type).view(np.uint8).reshape(shape[0], -1)


FLOAT_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)


@pytest.mark.parametrize("tensor_type", [*FLOAT_TYPES, *QUANTISED_TYPES], ids=lambda t: t.name)
def test_every_row_of_every_type_is_dequantised_as_by_gguf_py(
    tensor_type: GGMLQuantizationType, hf_config: dict[str, Any], tmp_path: Path
) -> None:
    """O-54. Bit by bit, against the reference applied to one row at a time."""
    block_size = GGML_QUANT_SIZES[tensor_type][0]
    shapes = [(64, 32), (64, 96), (3, 256), (7, 512), (48, 2048)]
    shapes = [shape for shape in shapes if shape[1] % block_size == 0]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for number, shape in enumerate(shapes):
        data = stored_bytes(tensor_type, shape)
        writer.add_tensor(str(number), data, raw_dtype=tensor_type)
    finish(writer)
    source = GgufSource(GgufFile(tmp_path / "x.gguf"), ModelConfig.from_hf(hf_config))
    for number, shape in enumerate(shapes):
        rows = stored_bytes(tensor_type, shape)
        expected = [gguf.quants.dequantize(row.reshape(1, -1), tensor_type)[0] for row in rows]
        ours = source.read(str(number)).astype(np.float32)
        assert ours.shape == shape
        assert ours.tobytes() == np.stack(expected).astype(np.float32).tobytes()
        assert len(np.unique(ours, axis=0)) == shape[0]


def test_types_that_are_not_supported_are_named(hf_config: dict[str, Any], tmp_path: Path) -> None:
    """O-54."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name in ("IQ4_NL", "F64", "F32"):
        tensor_type = GGMLQuantizationType[name]
        block_size, bytes_per_block = GGML_QUANT_SIZES[tensor_type]
        data = np.zeros((1, 32 // block_size * bytes_per_block), np.uint8)
        writer.add_tensor(f"tensor.{name}", data, raw_dtype=tensor_type)
    finish(writer)
    message = r"tensor\.IQ4_NL \(IQ4_NL\), tensor\.F64 \(F64\); supported: F32, .*, Q6_K$"
    with pytest.raises(CheckpointError, match=message):
        GgufSource(GgufFile(tmp_path / "x.gguf"), ModelConfig.from_hf(hf_config))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: w.add_expert_count(8), UnsupportedModelError, "llama.expert_count .* is 8"),
        (
            lambda w: w.add_sliding_window(64),
            UnsupportedModelError,
            "llama.attention.sliding_window .* is 64",
        ),
        (
            lambda w: w.add_attention_scale(0.5),
            UnsupportedModelError,
            "llama.attention.scale .* is 0.5",
        ),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            CheckpointError,
            "has no llama.rope.scaling.factor",
        ),
        (
            lambda w: (
                w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
                w.add_rope_scaling_factor(2.0),
            ),
            UnsupportedModelError,
            "rope_type 'longrope' .* not supported",
        ),
    ],
)
def test_unsupported_metadata_is_refused_by_name(
    make_llama: Callable[..., Any],
    tmp_path: Path,
    change: Change,
    error: type[Exception],
    message: str,
) -> None:
    path = write_llama_gguf(tmp_path / "x.gguf", make_llama(), change=change)
    with pytest.raises(error, match=message):
        gguf_model_config(GgufFile(path))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    writer.add_tensor("x", np.zeros(1, np.float32))
    finish(writer)
    with pytest.raises(UnsupportedModelError, match="architecture 'qwen2'; .* for: llama"):
        gguf_model_config(GgufFile(tmp_path / "x.gguf"))


@pytest.mark.torch
def test_missing_metadata_is_named(make_llama: Callable[..., Any], tmp_path: Path) -> None:
    path = write_llama_gguf(tmp_path / "x.gguf", make_llama())
    file = GgufFile(path)
    del file.metadata["llama.block_count"]
    with pytest.raises(CheckpointError, match=r"^x\.gguf has no llama\.block_count$"):
        gguf_model_config(file)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("rope_type", "keys"),
    [("linear", {}), ("yarn", {"original_max_position_embeddings": 32})],
)
def test_rope_scaling_keys_are_read(
    make_llama: Callable[..., Any], tmp_path: Path, rope_type: str, keys: dict[str, Any]
) -> None:
    """O-49."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope_type))
        writer.add_rope_scaling_factor(4.0)
        if keys:
            writer.add_rope_scaling_orig_ctx_len(32)

    model = make_llama()
    path = write_llama_gguf(tmp_path / "x.gguf", model, change=change)
    scaling = {"rope_type": rope_type, "factor": 4.0, "rope_theta": 10_000.0, **keys}
    expected = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": scaling,
    }
    assert gguf_model_config(GgufFile(path)).rope == ModelConfig.from_hf(expected).rope


@pytest.mark.torch
def test_llama3_scaling_is_read_from_the_factors_of_the_file(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    """O-49: converters write one factor for each frequency and no type of scaling."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10_000.0,
    }
    model = make_llama(rope_parameters=scaling)
    frequencies = model.model.rotary_emb.inv_freq.numpy()
    factors = 1e4 ** (-np.arange(8, dtype=np.float32) / 8) / frequencies
    assert len(np.unique(np.round(factors, 3))) > 2
    path = write_llama_gguf(
        tmp_path / "x.gguf", model, change=lambda w: w.add_tensor("rope_freqs.weight", factors)
    )
    file = GgufFile(path)
    config = gguf_model_config(file)
    np.testing.assert_allclose(inverse_frequencies(config.rope, 16), frequencies, rtol=1e-6)
    assert "rope_freqs.weight" not in GgufSource(file, config).names()


@pytest.mark.torch
def test_all_tokens_that_end_an_answer_are_found(
    make_llama: Callable[..., Any], tmp_path: Path
) -> None:
    """O-52, parsing."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(2)

    path = write_llama_gguf(tmp_path / "x.gguf", make_llama(), change=change)
    assert gguf_model_config(GgufFile(path)).eos_token_ids == (2, 7)
