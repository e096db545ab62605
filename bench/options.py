"""Options that several benchmarks have."""

from dataclasses import dataclass

from jpaged.config import DEMO_MODEL, option


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model to measure with."""

    model: str = option(DEMO_MODEL, "name, folder, .gguf file or Hub id of a model")
