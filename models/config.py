"""What a checkpoint's config.json says about a model, checked once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from jpaged.errors import CheckpointError
from jpaged.models.config_reader import ConfigReader
from jpaged.models.rope import RopeConfig
from jpaged.models.windows import layer_windows

# Keys that change what a model computes, with the values that leave it as implemented here.
_NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (),
    "pretraining_tp": (1,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "attention_chunk_size": (),
    "per_layer_config": (),
}
# Llama but for windows; transformers also knows these two without biases only.
_MISTRAL = ("MistralForCausalLM", "MinistralForCausalLM")
_MISTRAL_NEUTRAL_VALUES = {"attention_bias": (False,), "mlp_bias": (False,)}
# Of transformers, for keys that are absent; null means something else.
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and variants of a decoder-only model.

    architecture: the class name that Hugging Face configs give, e.g. "LlamaForCausalLM".
    head_dim: D; hidden_size need not equal num_heads * head_dim.
    max_position_embeddings: longest text the model was trained for.
    windows: how many tokens a token sees in each layer, itself included; None: all before it.
    eos_token_ids: end-of-sequence tokens of the config; empty when it names none.
    kv_head_copies: how many of the KV heads are copies of one head of the checkpoint, so that each
        device has one. vocab_padding: rows behind the vocabulary that stand for no token.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    kv_head_copies: int = 1
    vocab_padding: int = 0

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        name: str = "config.json",
    ) -> Self:
        """Read a parsed config.json.

        name: where the config comes from, for messages.

        Raises `UnsupportedModelError` for a variant that is not implemented and `CheckpointError`
        for a missing or impossible value; both name the key.
        """
        reader = ConfigReader(config, name=name)
        architecture = _architecture(reader)
        is_mistral = architecture in _MISTRAL
        if is_mistral:
            reader = ConfigReader(_MISTRAL_DEFAULTS | dict(config), name=name)
        neutral_values = _NEUTRAL_VALUES | (_MISTRAL_NEUTRAL_VALUES if is_mistral else {})
        for key, supported in neutral_values.items():
            reader.refuse_unless(key, *supported)
        num_layers = reader.integer("num_hidden_layers")
        num_heads = reader.integer("num_attention_heads")
        vocab_size = reader.integer("vocab_size")
        max_position_embeddings = reader.integer("max_position_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=reader.integer("hidden_size"),
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(reader, num_heads),
            head_dim=_head_dim(reader, num_heads),
            rms_norm_eps=reader.number("rms_norm_eps"),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
            attention_bias=reader.boolean("attention_bias", False),
            mlp_bias=reader.boolean("mlp_bias", False),
            rope=RopeConfig.from_hf(reader, max_position_embeddings=max_position_embeddings),
            windows=layer_windows(reader, num_layers, has_windows=is_mistral),
            bos_token_id=reader.integer("bos_token_id", None, minimum=0),
            eos_token_ids=reader.token_ids("eos_token_id", vocab_size=vocab_size),
        )


def _architecture(reader: ConfigReader) -> str:
    names = reader.values.get("architectures")
    if not isinstance(names, list | tuple) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(
            f"architectures in {reader.name} must be a list with one class name, got {names!r:.80}"
        )
    return names[0]


def _num_kv_heads(reader: ConfigReader, num_heads: int) -> int:
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads ({num_heads}) in {reader.name} must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    return num_kv_heads


def _head_dim(reader: ConfigReader, num_heads: int) -> int:
    head_dim = reader.integer("head_dim", None)
    if head_dim is None:
        hidden_size = reader.integer("hidden_size")
        if hidden_size % num_heads:
            raise CheckpointError(
                f"{reader.name} has no head_dim, and hidden_size ({hidden_size}) is no multiple "
                f"of num_attention_heads ({num_heads})"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise CheckpointError(f"head_dim of {reader.name} must be even, got {head_dim}")
    return head_dim
