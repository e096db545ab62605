"""A tiny random Llama as a Hugging Face folder, made without torch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.doubles import byte_tokenizer, save_tokenizer


def save_random_llama(folder: Path, **config) -> Path:
    """Weights are large enough for logits far apart, so that rounding decides no token."""
    tokenizer = byte_tokenizer()
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": None,
        **config,
    }
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return random.normal(size=shape, scale=0.3).astype(np.float32)

    hidden, heads = values["hidden_size"], values["num_attention_heads"] * values["head_dim"]
    kv_heads = values["num_key_value_heads"] * values["head_dim"]
    middle = values["intermediate_size"]
    tensors = {
        "model.embed_tokens.weight": matrix(values["vocab_size"], hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    if not values["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(values["vocab_size"], hidden)
    for layer in range(values["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.self_attn.q_proj.weight": matrix(heads, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, heads),
            f"{prefix}.mlp.gate_proj.weight": matrix(middle, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(middle, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, middle),
        }
        biased = {"self_attn": values["attention_bias"], "mlp": values["mlp_bias"]}
        for name in [name for name in tensors if name.startswith(f"{prefix}.")]:
            if biased.get(name.removeprefix(f"{prefix}.").split(".")[0]):
                tensors[name.replace(".weight", ".bias")] = matrix(len(tensors[name]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tokenizer, folder)
    return folder
