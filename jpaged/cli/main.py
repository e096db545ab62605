"""`jpaged`: the entry point of the command line."""

import argparse
import os
import sys
from collections.abc import Sequence

from jpaged.errors import EngineDeadError, JpagedError
from jpaged.startup.interruption import INTERRUPTED, ended_by_signals

INTERNAL_ERROR = 1
USER_ERROR = 2  # argparse's exit code for bad arguments, too
BROKEN_PIPE = 141  # 128 + SIGPIPE
EXIT_CODES = (
    "Exit codes: 0 success, 1 internal error, 2 a mistake in the options, the model or the "
    "request, 130 Ctrl-C, 141 nobody reads the output, 143 SIGTERM. A server ends with 0 on "
    "SIGTERM, and on Ctrl-C once it serves."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    with ended_by_signals():
        arguments = make_parser().parse_args(argv)
        with ended_by_signals(sigterm_code=arguments.command.sigterm_code):
            return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        arguments.command.run(arguments)
    except JpagedError as error:
        print(f"jpaged {arguments.command.name}: error: {error}", file=sys.stderr)
        return INTERNAL_ERROR if isinstance(error, EngineDeadError) else USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has enough; the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return 0


def make_parser() -> argparse.ArgumentParser:
    # Imported here, so that an interrupt of the imports is handled, too.
    from jpaged.cli.commands import COMMANDS
    from jpaged.version import version

    parser = argparse.ArgumentParser(
        prog="jpaged",
        description="Serves large language models with JAX.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jpaged {version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command_parser = commands.add_parser(
            command.name, help=command.help, description=command.help, allow_abbrev=False
        )
        command.add_arguments(command_parser)
        command_parser.set_defaults(command=command)
    return parser
