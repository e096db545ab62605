"""Writes Llamas of transformers as GGUF files, as llama.cpp's converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

F32 = gguf.GGMLQuantizationType.F32

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q and k in the order that llama.cpp's converter writes for the llama architecture."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def to_gguf_name(name: str) -> str:
    base, _, kind = name.rpartition(".")
    if base.startswith("model.layers."):
        index, _, part = base.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[base]}.{kind}"


def add_llama_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama_gguf(
    path: Path,
    model: Any,
    *,
    tensor_type: gguf.GGMLQuantizationType = F32,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """tensor_type: of the matrices. change: adds to the file before it is written."""
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    add_llama_metadata(writer, config)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        for part, num_heads in heads.items():
            values = permute(values, num_heads) if part in name else values
        stored = tensor_type if values.ndim == 2 else F32
        data = gguf.quants.quantize(values, stored)
        writer.add_tensor(to_gguf_name(name), data, raw_dtype=stored)
    change(writer)
    finish(writer)
    return path
