"""jpaged: an LLM serving engine in JAX with a paged KV cache.

The public names are imported on first use, so that `import jpaged` alone starts neither JAX nor a
device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.async_engine import AsyncEngine as AsyncEngine
    from jpaged.beam_search_params import BeamSearchParams as BeamSearchParams
    from jpaged.config import EngineConfig as EngineConfig
    from jpaged.errors import CheckpointError as CheckpointError
    from jpaged.errors import ConfigError as ConfigError
    from jpaged.errors import EngineDeadError as EngineDeadError
    from jpaged.errors import JpagedError as JpagedError
    from jpaged.errors import PromptTooLongError as PromptTooLongError
    from jpaged.errors import RequestError as RequestError
    from jpaged.errors import UnsupportedModelError as UnsupportedModelError
    from jpaged.llm import LLM as LLM
    from jpaged.outputs import CompletionOutput as CompletionOutput
    from jpaged.outputs import FinishReason as FinishReason
    from jpaged.outputs import RequestOutput as RequestOutput
    from jpaged.outputs import RequestTiming as RequestTiming
    from jpaged.outputs import TokenLogprobs as TokenLogprobs
    from jpaged.sampling_params import SamplingParams as SamplingParams

_MODULES = {
    "AsyncEngine": "jpaged.async_engine",
    "BeamSearchParams": "jpaged.beam_search_params",
    "CheckpointError": "jpaged.errors",
    "CompletionOutput": "jpaged.outputs",
    "ConfigError": "jpaged.errors",
    "EngineConfig": "jpaged.config",
    "EngineDeadError": "jpaged.errors",
    "FinishReason": "jpaged.outputs",
    "JpagedError": "jpaged.errors",
    "LLM": "jpaged.llm",
    "PromptTooLongError": "jpaged.errors",
    "RequestError": "jpaged.errors",
    "RequestOutput": "jpaged.outputs",
    "RequestTiming": "jpaged.outputs",
    "SamplingParams": "jpaged.sampling_params",
    "TokenLogprobs": "jpaged.outputs",
    "UnsupportedModelError": "jpaged.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
