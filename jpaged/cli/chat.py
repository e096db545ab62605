"""`jpaged chat`: a conversation in the terminal."""

import argparse
import asyncio
import signal

from jpaged.cli.command import Command
from jpaged.cli.model_argument import add_model_argument, apply_model_argument
from jpaged.cli.options import read_options
from jpaged.cli.sampling import add_generation_options, read_sampling_options
from jpaged.config import EngineConfig


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_generation_options(parser, max_tokens=None)


def _run(arguments: argparse.Namespace) -> None:
    apply_model_argument(arguments)
    given = read_sampling_options(arguments)
    config = read_options(EngineConfig, arguments)

    from jpaged.async_engine import AsyncEngine
    from jpaged.cli.terminal import Conversation

    engine = AsyncEngine(config)
    with asyncio.Runner() as runner:
        try:
            runner.run(engine.start())
            # From here on Ctrl-C stops an answer.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            Conversation(engine, given, runner).run()
        finally:
            runner.run(engine.shutdown())


CHAT = Command(
    name="chat",
    help="talk with a chat model in the terminal",
    add_arguments=_add_arguments,
    run=_run,
)
