"""`jpaged generate`: one prompt, continued in the terminal."""

import argparse
import asyncio

from jpaged.cli.command import Command
from jpaged.cli.options import add_options, read_options
from jpaged.cli.sampling import add_sampling_options, read_sampling_options
from jpaged.config import EngineConfig
from jpaged.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 256
# Options that make no sense where the answer is read: text is needed, and --seed is the sample's.
SKIPPED_OPTIONS = ("seed", "skip_tokenizer_init")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    add_sampling_options(parser, max_tokens=DEFAULT_MAX_TOKENS)
    add_options(parser, EngineConfig, title="engine", skip=SKIPPED_OPTIONS)


def _run(arguments: argparse.Namespace) -> None:
    params = read_sampling_options(arguments)
    config = read_options(EngineConfig, arguments)
    asyncio.run(_generate(config, arguments.prompt, params))


async def _generate(config: EngineConfig, prompt: str, params: SamplingParams) -> None:
    from jpaged.async_engine import AsyncEngine
    from jpaged.cli.terminal import print_answer

    engine = AsyncEngine(config)
    try:
        await engine.start()
        await print_answer(engine, prompt, params)
    finally:
        await engine.shutdown()


GENERATE = Command(
    name="generate",
    help="continue a prompt and print the text as it comes",
    add_arguments=_add_arguments,
    run=_run,
)
