"""Which class implements which architecture."""

import importlib

from jpaged.errors import UnsupportedModelError

# Class name in a Hugging Face config -> "module:class", imported when it is asked for.
ARCHITECTURES = {
    "LlamaForCausalLM": "jpaged.models.llama:Llama",
    "MinistralForCausalLM": "jpaged.models.llama:Llama",
    "MistralForCausalLM": "jpaged.models.llama:Llama",
}


def model_class(architecture: str) -> type:
    """The Flax NNX module for an architecture. Errors of its import are not caught."""
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    module_name, _, class_name = ARCHITECTURES[architecture].partition(":")
    return getattr(importlib.import_module(module_name), class_name)
