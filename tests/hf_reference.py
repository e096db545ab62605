"""Answers of Hugging Face transformers on a CPU: the oracle of the parity tests. Needs torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.doubles import byte_level_tokenizer, save_tokenizer

# Where the two most likely tokens are closer than this, rounding may decide between them.
TIE_GAP = 1e-4


class GreedyAnswer(NamedTuple):
    """gaps: how far the most likely token's logit was above the second, for each token."""

    token_ids: list[int]
    gaps: list[float]


def save_tiny_llama(folder: Path, *, family: str = "Llama", **config: Any) -> Path:
    """Write a random Llama with a tokenizer. `config` overrides LlamaConfig's arguments.

    By default: grouped queries, head_dim other than hidden size / heads, weights that are large
    enough for logits far apart. family: names another pair of classes, e.g. Mistral.
    """
    import torch
    import transformers

    tokenizer = byte_level_tokenizer()
    values = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        **config,
    }
    torch.manual_seed(0)
    hf_config = getattr(transformers, f"{family}Config")(**values)
    model = getattr(transformers, f"{family}ForCausalLM")(hf_config)
    for name, parameter in model.named_parameters():
        # transformers starts biases at zero and norms at one, which would hide their omission.
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def load_hf_model(path: Path) -> Any:
    """A folder, or a .gguf file dequantised by transformers itself, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    is_file = path.is_file()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent if is_file else path,
        gguf_file=path.name if is_file else None,
        dtype=torch.float32,
        attn_implementation="eager",
    )
    model.generation_config.eos_token_id = None  # else it would end answers
    return model.eval()


def hf_greedy(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[GreedyAnswer]:
    """The most likely tokens after each prompt; end-of-sequence tokens end nothing."""
    import torch

    with torch.inference_mode():
        return [_greedy_answer(model, list(prompt), num_tokens) for prompt in prompts]


def _greedy_answer(model: Any, prompt: list[int], num_tokens: int) -> GreedyAnswer:
    import torch

    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    return GreedyAnswer(
        output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()
    )


def hf_greedy_along(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[GreedyAnswer]:
    """The most likely token at each place of given answers, from one forward pass each.

    Where an answer is right up to a place, this is what `hf_greedy` has there, much sooner.
    """
    import torch

    results = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
            best = logits[len(prompt) - 1 : -1].topk(2)
            gaps = best.values[:, 0] - best.values[:, 1]
            results.append(GreedyAnswer(best.indices[:, 0].tolist(), gaps.tolist()))
    return results


def assert_greedy_parity(ours: Sequence[Sequence[int]], theirs: Sequence[GreedyAnswer]) -> None:
    """Equal ids. A first difference is accepted at a tie, after which nothing is compared."""
    assert len(ours) == len(theirs)
    for number, (token_ids, answer) in enumerate(zip(ours, theirs, strict=True)):
        assert len(token_ids) == len(answer.token_ids), f"answer {number} has another length"
        for position, expected in enumerate(answer.token_ids):
            if token_ids[position] == expected:
                continue
            gap = answer.gaps[position]
            assert gap < TIE_GAP, (
                f"answer {number} differs at token {position}: got {token_ids[position]}, "
                f"expected {expected}, which leads by {gap:.2g}"
            )
            break
