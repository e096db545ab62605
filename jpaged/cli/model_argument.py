"""The model as a positional argument, beside `--model`."""

import argparse

from jpaged.errors import ConfigError


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")


def apply_model_argument(arguments: argparse.Namespace) -> None:
    """Moves a positional model to where `--model` puts it."""
    if arguments.positional_model is None:
        return
    flagged = getattr(arguments, "model", arguments.positional_model)
    if flagged != arguments.positional_model:
        raise ConfigError(
            f"two models given: {arguments.positional_model} and --model {flagged}; give one"
        )
    arguments.model = arguments.positional_model
