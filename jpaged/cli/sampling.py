"""Sampling options of the commands that generate in the terminal."""

import argparse
from dataclasses import fields

from jpaged.cli.options import integer, with_flags
from jpaged.errors import RequestError
from jpaged.sampling_params import SamplingParams

_DEFAULTS = SamplingParams()


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """max_tokens: default of the command; None is as many as fit the context."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=integer,
        default=max_tokens,
        metavar="INT",
        help=f"most tokens of an answer (default: {max_tokens or 'as many as fit the context'})",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=_DEFAULTS.temperature,
        metavar="FLOAT",
        help="0 takes the most likely token (default: %(default)s)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=_DEFAULTS.top_p,
        metavar="FLOAT",
        help="keep the most likely tokens that reach this probability (default: %(default)s)",
    )
    group.add_argument(
        "--top-k",
        type=integer,
        default=_DEFAULTS.top_k,
        metavar="INT",
        help="keep this many tokens; 0 keeps all (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        dest="sampling_seed",  # the engine's own seed is another thing
        type=integer,
        metavar="INT",
        help="makes the answer reproducible (default: drawn)",
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer before this text; may be given several times",
    )


def read_sampling_options(arguments: argparse.Namespace) -> SamplingParams:
    """Raises `RequestError` that names the option."""
    try:
        return SamplingParams(
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            seed=arguments.sampling_seed,
            max_tokens=arguments.max_tokens,
            stop=arguments.stop,
        )
    except RequestError as error:
        names = [item.name for item in fields(SamplingParams)]
        raise RequestError(with_flags(str(error), names), param=error.param) from error
