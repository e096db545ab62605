"""`jpaged`: the entry point of the command line."""

import argparse
import os
import sys
from collections.abc import Sequence

from jpaged.cli.bench import BENCH
from jpaged.cli.chat import CHAT
from jpaged.cli.command import Command
from jpaged.cli.generate import GENERATE
from jpaged.cli.serve import SERVE
from jpaged.errors import EngineDeadError, JpagedError
from jpaged.version import version

COMMANDS: tuple[Command, ...] = (SERVE, GENERATE, CHAT, BENCH)

INTERNAL_ERROR = 1
USER_ERROR = 2  # argparse's exit code for bad arguments, too
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    arguments = make_parser().parse_args(argv)
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
    parser = argparse.ArgumentParser(
        prog="jpaged",
        description="Serves large language models with JAX.",
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
