"""The commands, in the order in which the help lists them."""

from jpaged.cli.bench import BENCH
from jpaged.cli.chat import CHAT
from jpaged.cli.command import Command
from jpaged.cli.generate import GENERATE
from jpaged.cli.serve import SERVE

COMMANDS: tuple[Command, ...] = (SERVE, GENERATE, CHAT, BENCH)
