"""GGUF metadata in the terms of a Hugging Face config."""

from typing import Any

import numpy as np

from jpaged.errors import CheckpointError, UnsupportedModelError
from jpaged.models.config import ModelConfig
from jpaged.models.config_reader import ConfigReader
from jpaged.models.formats.gguf_file import GgufFile
from jpaged.models.formats.gguf_generation import end_token_ids

ARCHITECTURE = "llama"
# One factor for each wavelength; how converters store the scaling of Llama 3.
ROPE_FACTORS = "rope_freqs.weight"

# Keys that change what a model computes, with the values that leave it as implemented here.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "llama.expert_count": (0,),
    "llama.attention.sliding_window": (0,),
    "llama.attention.causal": (True,),
    "llama.attention.clamp_kqv": (0,),
    "llama.attention.max_alibi_bias": (0,),
    "llama.attention.scale": (),
    "llama.attn_logit_softcapping": (0,),
    "llama.final_logit_softcapping": (0,),
    "llama.logit_scale": (0, 1),
    "llama.residual_scale": (0, 1),
    "llama.embedding_scale": (0, 1),
    "llama.rope.scale_linear": (1,),
    "llama.rope.scaling.attn_factor": (1,),
    "llama.rope.scaling.yarn_attn_factor": (1,),
    "llama.rope.scaling.yarn_ext_factor": (1, -1),
    "llama.rope.scaling.yarn_log_multiplier": (0,),
}


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """Raises `UnsupportedModelError` or `CheckpointError` that names the metadata key."""
    reader = ConfigReader(file.metadata, name=file.path.name)
    architecture = reader.string("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedModelError(
            f"{file.path.name} is of architecture {architecture!r}; "
            f"GGUF files are supported for: {ARCHITECTURE}"
        )
    for key, supported in _NEUTRAL_VALUES.items():
        reader.refuse_unless(key, *supported)
    return ModelConfig.from_hf(_hf_config(file, reader), name=file.path.name)


def _hf_config(file: GgufFile, reader: ConfigReader) -> dict[str, Any]:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path.name} has no tensor token_embd.weight")
    vocab_size = file.tensors["token_embd.weight"].shape[0]
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": reader.integer("llama.embedding_length"),
        "intermediate_size": reader.integer("llama.feed_forward_length"),
        "num_hidden_layers": reader.integer("llama.block_count"),
        "num_attention_heads": reader.integer("llama.attention.head_count"),
        "num_key_value_heads": reader.integer("llama.attention.head_count_kv", None),
        "head_dim": _head_dim(reader),
        "rms_norm_eps": reader.number("llama.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": reader.integer("llama.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "rope_theta": reader.number("llama.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, reader),
        "bos_token_id": reader.integer("tokenizer.ggml.bos_token_id", None, minimum=0),
        "eos_token_id": end_token_ids(reader, vocab_size=vocab_size),
    }


def _head_dim(reader: ConfigReader) -> int | None:
    """Heads of one size for keys and values, all of it rotated."""
    head_dim = reader.integer("llama.attention.key_length", None)
    size = head_dim or reader.integer("llama.embedding_length") // reader.integer(
        "llama.attention.head_count"
    )
    reader.refuse_unless("llama.attention.value_length", size)
    reader.refuse_unless("llama.rope.dimension_count", size)
    return head_dim


def _rope_scaling(file: GgufFile, reader: ConfigReader) -> dict[str, Any] | None:
    rope_type = reader.string("llama.rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        reader.refuse_unless("llama.rope.scaling.type", "none")
        factors = file.tensor_bytes(ROPE_FACTORS)
        if file.tensors[ROPE_FACTORS].type.name != "F32":
            raise CheckpointError(f"{ROPE_FACTORS} in {file.path.name} must be of type F32")
        return {"rope_type": "frequency_factors", "factors": factors.view(np.float32).tolist()}
    if rope_type == "none":
        return None
    return {
        "rope_type": rope_type,
        "factor": reader.number("llama.rope.scaling.factor"),
        "original_max_position_embeddings": reader.integer(
            "llama.rope.scaling.original_context_length", None
        ),
        "beta_fast": reader.number("llama.rope.scaling.yarn_beta_fast", None),
        "beta_slow": reader.number("llama.rope.scaling.yarn_beta_slow", None),
    }
