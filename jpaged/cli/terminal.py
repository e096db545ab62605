"""Prints answers as they come, and holds conversations.

Commands import this module when they run, as the engine takes a while to import.
"""

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jpaged.async_engine import AsyncEngine
from jpaged.errors import RequestError
from jpaged.inputs import Prompt
from jpaged.sampling_params import SamplingParams

EXIT_COMMAND = "/exit"
CLEAR_COMMAND = "/clear"
HINT = f"{EXIT_COMMAND} or Ctrl-D ends, {CLEAR_COMMAND} forgets all turns, Ctrl-C stops an answer"


async def print_answer(engine: AsyncEngine, prompt: Prompt, given: Mapping[str, Any]) -> str:
    """Stream the answer to standard output, end the line, and return the text.

    given: sampling parameters; for the others the model's defaults hold.
    """
    params = SamplingParams(**{**engine.sampling_defaults, **given})
    text = ""
    async with contextlib.aclosing(engine.generate(prompt, params)) as outputs:
        async for output in outputs:
            whole = output.outputs[0].text
            print(whole[len(text) :], end="", flush=True)
            text = whole
    print(flush=True)
    return text


class Conversation:
    """Answers each line that is read, with the turns before it in mind.

    At a terminal it prompts, and goes on after a refused message or a stopped answer. Other
    input is read to its end, and a refused message ends the conversation.

    given: sampling parameters of every answer; for the others the model's defaults hold.
    """

    def __init__(
        self, engine: AsyncEngine, given: Mapping[str, Any], runner: asyncio.Runner
    ) -> None:
        self._engine = engine
        self._given = given
        self._runner = runner
        self._turns: list[dict[str, str]] = []
        self._is_interactive = sys.stdin.isatty()

    def run(self) -> None:
        if self._is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (input() then edits lines and recalls them)
            print(f"{self._engine.model_name}: {HINT}")
        for line in self._lines():
            text = line.strip()
            if text == EXIT_COMMAND:
                return
            if text == CLEAR_COMMAND:
                self._turns.clear()
            elif text:
                self._answer(text)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield input("> " if self._is_interactive else "")
            except EOFError:
                return

    def _answer(self, text: str) -> None:
        question = {"role": "user", "content": text}
        try:
            answer = self._runner.run(self._print_answer([*self._turns, question]))
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            print("\n(stopped and forgotten)")
        except RequestError as error:
            if not self._is_interactive:
                raise
            print(f"refused: {error}", file=sys.stderr)
        else:
            self._turns += [question, {"role": "assistant", "content": answer}]

    async def _print_answer(self, turns: list[dict[str, str]]) -> str:
        return await print_answer(self._engine, self._engine.chat_prompt(turns), self._given)
