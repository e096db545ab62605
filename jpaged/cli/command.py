"""What a command of the command line is."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from jpaged.startup.interruption import TERMINATED


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: the word after `jpaged`, and what it does.

    add_arguments: declares the command's options; imports nothing heavy.
    run: does the work; raises `JpagedError` for mistakes of the user.
    sigterm_code: exit code when SIGTERM ends the command.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]
    sigterm_code: int = TERMINATED
