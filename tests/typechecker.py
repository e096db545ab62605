"""The type checker of the import hook: beartype, given what it can check function by function."""

from collections.abc import Callable
from typing import Any, Self, get_args

from beartype import BeartypeConf, beartype

# These check what users give them, and tests give them what is wrong.
PARSERS = (
    "jpaged.async_engine",
    "jpaged.beam_search_params",
    "jpaged.config",
    "jpaged.engine",
    "jpaged.inputs",
    "jpaged.llm",
    "jpaged.sampling_params",
)

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(function, "__module__", None) in PARSERS:
        return function
    annotations = getattr(function, "__annotations__", {})
    function.__annotations__ = {
        name: hint if _is_checkable(hint) else object for name, hint in annotations.items()
    }
    return _check(function)


def _is_checkable(hint: object) -> bool:
    """False for `Self`, which beartype knows in decorated classes only, and for bare protocols."""
    is_bare_protocol = getattr(hint, "_is_protocol", False) and not getattr(
        hint, "_is_runtime_protocol", False
    )
    return hint is not Self and not is_bare_protocol and all(map(_is_checkable, get_args(hint)))
