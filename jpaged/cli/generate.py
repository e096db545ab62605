"""`jpaged generate`: one prompt, answered in the terminal."""

import argparse
import asyncio
from typing import Any

from jpaged.cli.command import Command
from jpaged.cli.options import read_options
from jpaged.cli.sampling import add_generation_options, read_sampling_options
from jpaged.config import EngineConfig

DEFAULT_MAX_TOKENS = 256


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask, or with --raw to continue")
    parser.add_argument(
        "--raw",
        action="store_true",
        help="continue the prompt as it is, instead of putting it in the model's chat template",
    )
    add_generation_options(parser, max_tokens=DEFAULT_MAX_TOKENS)


def _run(arguments: argparse.Namespace) -> None:
    given = read_sampling_options(arguments)
    config = read_options(EngineConfig, arguments)
    asyncio.run(_generate(config, arguments.prompt, given, is_raw=arguments.raw))


async def _generate(
    config: EngineConfig, text: str, given: dict[str, Any], *, is_raw: bool
) -> None:
    from jpaged.async_engine import AsyncEngine
    from jpaged.cli.terminal import print_answer

    engine = AsyncEngine(config)
    try:
        await engine.start()
        assert engine.tokenizer is not None
        is_chat = engine.tokenizer.has_chat_template and not is_raw
        prompt = engine.chat_prompt([{"role": "user", "content": text}]) if is_chat else text
        await print_answer(engine, prompt, given)
    finally:
        await engine.shutdown()


GENERATE = Command(
    name="generate",
    help="answer a prompt and print the text as it comes",
    add_arguments=_add_arguments,
    run=_run,
)
