"""Small real checkpoints, written by the libraries that users write theirs with."""

from collections.abc import Callable
from typing import Any

import pytest

from jpaged.config import DEMO_MODEL
from jpaged.startup.model_files import ModelFiles, resolve_model


@pytest.fixture(scope="session")
def demo_files() -> ModelFiles:
    return resolve_model(DEMO_MODEL)


@pytest.fixture
def hf_config() -> dict[str, Any]:
    """A config.json as transformers writes it for a tiny Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 51,
    }


@pytest.fixture
def make_llama() -> Callable[..., Any]:
    """Random tiny Llamas of transformers; keyword arguments override their config."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def make(**overrides: Any) -> Any:
        sizes = {
            "vocab_size": 51,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
        }
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | overrides))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.normal_()
        return model

    return make
