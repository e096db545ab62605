"""Small stand-ins for real tokenizers and models. They need no network and no torch."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

BOS = "<s>"
EOS = "</s>"
# An added token that is not special: part of the text whatever skip_special_tokens says.
TAG = "<tag>"
END_TAG = "</tag>"

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and the hello world" + " Paris" * 9,
    "fire 🔥 é 漢字 a    b\n\n  c 👨‍👩‍👧 naïve café ¡Olé! 漢字 漢 字 🔥🔥",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Decoder:
    """A tokenizer of the library, with what a detokenizer asks for besides."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self.special_tokens = {number: token.content for number, token in added if token.special}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def byte_tokenizer() -> Tokenizer:
    """One token a byte (in the order of ByteLevel's alphabet), and the added tokens."""
    return _byte_level_bpe(vocab_size=256)


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE as of GPT-2, Llama 3 or Qwen: characters can span tokens."""
    return _byte_level_bpe(vocab_size=300)


def _byte_level_bpe(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return _with_added_tokens(tokenizer)


def sentencepiece_tokenizer() -> Tokenizer:
    """SentencePiece style as of Llama 2 or Gemma: "▁" for spaces, byte tokens as a fallback.

    Decoding drops the first space of a text, and makes U+FFFD of every byte of a run of byte
    tokens when the run is not valid UTF-8.
    """
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(set("".join(_CORPUS[0].split())))
    words = ["▁", "▁▁", "▁▁▁▁", *letters, "he", "▁he", "ll"]
    pieces += dict.fromkeys(words)
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("h", "e"), ("▁", "he"), ("l", "l")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: token_id for token_id, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _with_added_tokens(tokenizer)


def _with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in (TAG, END_TAG)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of a Hugging Face tokenizer, with a chat template."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def chain(token_ids: Sequence[int]) -> dict[int, int]:
    """Token -> next token, for a scripted model that says `token_ids` one after the other."""
    links = dict(zip(token_ids[:-1], token_ids[1:], strict=True))
    if len(links) != len(token_ids) - 1:
        raise ValueError("a token occurs twice: a scripted model knows only the last token")
    return links


def save_scripted_model(
    folder: Path,
    tokenizer: Tokenizer,
    next_token: Mapping[int, int],
    *,
    first_token: int,
    eos_token_ids: Iterable[int] = (),
) -> Path:
    """Write a Llama that follows a script, whatever the sampling parameters.

    Attention and MLP add nothing to the residual stream (o_proj and down_proj are zero), so the
    last token alone decides. After a token without an entry in `next_token`, such as a prompt's,
    comes `first_token`. Logits are 80 or more for the token of the script, 0 for all others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder)
    # Each scripted token has a dimension of its own; number 0 is shared by all others.
    hidden_size = max(64, -(-(len(next_token) + 1) // 16) * 16)
    vocab_size = tokenizer.get_vocab_size()
    embedding = np.zeros((vocab_size, hidden_size), np.float32)
    head = np.zeros((vocab_size, hidden_size), np.float32)
    embedding[:, 0] = 1
    head[first_token, 0] = 10
    for dimension, (token_id, next_id) in enumerate(next_token.items(), start=1):
        embedding[token_id] = np.eye(hidden_size)[dimension]
        head[next_id, dimension] = 10
    config = _scripted_config(vocab_size, hidden_size, list(eos_token_ids))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(hidden_size, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(config["num_hidden_layers"]):
        tensors |= _scripted_layer(f"model.layers.{layer}", hidden_size, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _scripted_config(vocab_size: int, hidden_size: int, eos_token_ids: list[int]) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_token_ids or None,
        "dtype": "float32",
    }


def _scripted_layer(prefix: str, hidden_size: int, config: dict) -> dict[str, np.ndarray]:
    """Weights that are random where they do not matter."""
    random = np.random.default_rng(0)
    query_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    mlp_size = config["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (query_size, hidden_size),
        "self_attn.k_proj": (kv_size, hidden_size),
        "self_attn.v_proj": (kv_size, hidden_size),
        "self_attn.o_proj": (hidden_size, query_size),
        "mlp.gate_proj": (mlp_size, hidden_size),
        "mlp.up_proj": (mlp_size, hidden_size),
        "mlp.down_proj": (hidden_size, mlp_size),
    }
    tensors = {
        f"{prefix}.{name}.weight": random.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"{prefix}.{name}.weight"][:] = 0
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = np.ones(hidden_size, np.float32)
    return tensors
