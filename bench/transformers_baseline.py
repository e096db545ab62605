"""Generation by transformers. Needs torch."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from jpaged.bench.workload import Work
from jpaged.startup.model_files import resolve_model

# Where the two most likely tokens are closer than this, rounding decides between them.
TIE_GAP = 1e-3


class TransformersBaseline:
    """A model in float32 with the attention that transformers chooses by itself."""

    def __init__(self, model: str) -> None:
        files = resolve_model(model)
        is_gguf = files.kind == "gguf"
        disable_progress_bar()
        with warnings.catch_warnings(action="ignore"):
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                files.path.parent if is_gguf else files.path,
                gguf_file=files.path.name if is_gguf else None,
                dtype=torch.float32,
            ).eval()
        # Every request gets as many tokens as it asks for.
        self._model.generation_config.eos_token_id = None

    def generate(self, works: Sequence[Work], *, batch_size: int) -> list[list[int]]:
        """Answer greedily in static batches, each of which runs as long as its longest answer."""
        answers = []
        for start in range(0, len(works), batch_size):
            answers += self._generate_batch(works[start : start + batch_size])
        return answers

    def _generate_batch(self, works: Sequence[Work]) -> list[list[int]]:
        width = max(len(work.prompt) for work in works)
        padding = [width - len(work.prompt) for work in works]
        inputs = [[0] * pad + work.prompt for pad, work in zip(padding, works, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(inputs),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                max_new_tokens=max(work.num_output_tokens for work in works),
                pad_token_id=0,
            )
        return [
            row[width : width + work.num_output_tokens].tolist()
            for row, work in zip(output, works, strict=True)
        ]

    def is_greedy(self, work: Work, answer: Sequence[int]) -> bool:
        """Whether each token is the most likely one after those before it, or ties with it."""
        with torch.inference_mode():
            token_ids = torch.tensor([[*work.prompt, *answer]])
            logits = self._model(token_ids, use_cache=False).logits[0, len(work.prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        return bool((logits.max(dim=1).values - chosen < TIE_GAP).all())
