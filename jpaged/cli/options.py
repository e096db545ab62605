"""Command-line options made from the fields of a config dataclass, and back.

Names, defaults and help texts have one home, the dataclass; the command line only shows them.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin

from jpaged.errors import ConfigError

Config = TypeVar("Config")

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_INTEGER = re.compile(r"([+-]?\d+)([kKmMgG]?)")


def flag(name: str) -> str:
    """max_model_len -> --max-model-len"""
    return "--" + name.replace("_", "-")


def add_options(
    parser: argparse.ArgumentParser, config_class: type, *, title: str, skip: Sequence[str] = ()
) -> None:
    """One option a field. An option that is not given leaves the field's default in place."""
    group = parser.add_argument_group(title)
    for item in fields(config_class):
        if item.name not in skip:
            group.add_argument(
                flag(item.name),
                dest=item.name,
                default=argparse.SUPPRESS,
                help=_help(item),
                **value_arguments(item.type),
            )


def read_options(config_class: type[Config], arguments: argparse.Namespace) -> Config:
    """The config with the options given. Raises `ConfigError` that names the option."""
    names = [item.name for item in fields(config_class)]  # pyright: ignore[reportArgumentType]
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    given = {name: _tuple_if_list(value) for name, value in given.items()}
    try:
        return config_class(**given)
    except ConfigError as error:
        if error.option is None:
            raise
        raise ConfigError(f"{flag(error.option)}: {error}", option=error.option) from error


def integer(text: str) -> int:
    """Reads 4096, 4k (4000) or 4K (4096); m, M, g and G likewise."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer such as 4096, 4k or 4K")
    return int(match[1]) * _SUFFIXES[match[2]]


def value_arguments(annotation: Any) -> dict[str, Any]:
    """How argparse reads a value of the annotated type."""
    if get_origin(annotation) is UnionType:
        (annotation,) = (member for member in get_args(annotation) if member is not NoneType)
    if get_origin(annotation) is tuple:  # any number of values, each behind an option of its own
        item, _ = get_args(annotation)
        return {"action": "append", "type": item, "metavar": item.__name__.upper()}
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(annotation) is Literal:
        return {"choices": get_args(annotation)}
    readers = {str: str, int: integer, float: float}
    assert annotation in readers, f"no way to read a {annotation} from the command line"
    return {"type": readers[annotation], "metavar": annotation.__name__.upper()}


def _tuple_if_list(value: Any) -> Any:
    """Configs are frozen, and so are their fields."""
    return tuple(value) if isinstance(value, list) else value


def _help(item: "Field[Any]") -> str:
    text = item.metadata["help"].replace("%", "%%")
    assert item.default is not MISSING, f"{item.name} has no default"
    if item.default in (None, "", ()) or "(default:" in text:
        return text
    shown = ("on" if item.default else "off") if item.type is bool else item.default
    return f"{text} (default: {shown})"
