"""Options of the commands that generate in the terminal: of the sampling and of the engine."""

import argparse
from dataclasses import fields
from typing import Any

from jpaged.cli.options import add_options, flag, value_arguments
from jpaged.config import EngineConfig
from jpaged.errors import RequestError
from jpaged.sampling_params import SamplingParams

# The fields of `SamplingParams` that are options, with their help texts.
_HELP = {
    "temperature": "0 takes the most likely token (default: the model's, else 1.0)",
    "top_p": "keep the most likely tokens that reach this probability (default: the model's, "
    "else 1.0)",
    "top_k": "keep this many tokens; 0 keeps all (default: the model's, else 0)",
    "seed": "makes the answer reproducible; -1 draws one (default: drawn)",
}
# The engine has a seed, too, which is another thing: `--seed` is the sample's.
_SEED = "sampling_seed"
# Engine options that make no sense where the answer is read, which needs text.
_LEFT_OUT = ("seed", "skip_tokenizer_init")


def add_generation_options(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Declare the sampling options and those of the engine.

    max_tokens: default of the command; None is as many as fit the context.
    """
    _add_sampling_options(parser, max_tokens)
    add_options(parser, EngineConfig, title="engine", skip=_LEFT_OUT)


def read_sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The parameters that were given; for the others the model's defaults hold.

    Raises `RequestError` that names the option.
    """
    values = {name: getattr(arguments, name, None) for name in (*_HELP, "stop")}
    values["seed"] = getattr(arguments, _SEED)
    given = {name: value for name, value in values.items() if value is not None}
    given["max_tokens"] = arguments.max_tokens  # None is a value of its own
    try:
        SamplingParams(**given)
    except RequestError as error:
        if error.param is None:
            raise
        raise RequestError(f"{flag(error.param)}: {error}", param=error.param) from error
    return given


def _add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling")
    types = {item.name: item.type for item in fields(SamplingParams)}
    group.add_argument(
        "--max-tokens",
        default=max_tokens,
        help=f"most tokens of an answer (default: {max_tokens or 'as many as fit the context'})",
        **value_arguments(types["max_tokens"]),
    )
    for name, text in _HELP.items():
        dest = _SEED if name == "seed" else name
        group.add_argument(flag(name), dest=dest, help=text, **value_arguments(types[name]))
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )
