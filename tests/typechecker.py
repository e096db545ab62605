"""Checks annotations in every call: types with beartype, and shapes of arrays with jaxtyping.

jaxtyping binds every call's arguments anew, which takes ten times as long as to check their types.
So only packages whose annotations have shapes pay for that.
"""

from collections.abc import Callable
from typing import Any, Self, get_args

from beartype import BeartypeConf, beartype
from beartype.claw import beartype_package
from jaxtyping import install_import_hook

WITH_SHAPES = ("jpaged.bench", "jpaged.execution", "jpaged.models", "pallas_kernels")
# These check what users give them, and tests give them what is wrong.
PARSERS = (
    "jpaged.async_engine",
    "jpaged.beam_search_params",
    "jpaged.config",
    "jpaged.inline_engine",
    "jpaged.inputs",
    "jpaged.llm",
    "jpaged.sampling_params",
    "jpaged.server.options",
)

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_annotations() -> None:
    """Call it before anything imports the packages."""
    beartype_package(
        "jpaged",
        conf=BeartypeConf(
            is_pep484_tower=True,
            claw_is_pep526=False,
            claw_skip_package_names=(*PARSERS, *WITH_SHAPES),
        ),
    )
    install_import_hook(WITH_SHAPES, "tests.typechecker.check")


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: beartype, given what it can check function by function."""
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
