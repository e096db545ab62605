"""`jpaged generate` and `jpaged chat`, with the scripted engine behind them."""

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import jpaged.cli.terminal  # noqa: F401  # before the engine's class is replaced
from jpaged.cli.main import main
from jpaged.sampling_params import SamplingParams
from jpaged.text.tokenizer import Tokenizer
from tests.http.scripted_engine import ScriptedEngine
from tests.http.test_disconnect import wait_until


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    scripted = ScriptedEngine(tmp_path)
    monkeypatch.setattr("jpaged.async_engine.AsyncEngine", lambda config: scripted)
    return scripted


class Terminal(io.StringIO):
    """Lines that are typed. The prompts of `input` go to standard output."""

    def isatty(self) -> bool:
        return True


def chat(monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", stdin)
    return main(["chat", "--max-tokens", "200", *options])


def test_generate(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """A question by default, so in the chat template; with --raw a text to go on with."""
    assert main(["generate", "hello"]) == 0
    assert capsys.readouterr().out == "[<user>hello\n<assistant>]\n"
    assert main(["generate", "hello", "--raw"]) == 0
    assert capsys.readouterr().out == "[hello]\n"
    assert main(["generate", "hello", "--raw", "--max-tokens", "3", "--stop", "x"]) == 0
    assert capsys.readouterr().out == "[he\n"
    assert not engine.running


def test_generate_without_a_chat_template_continues_the_text(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Tokenizer, "has_chat_template", False)
    assert main(["generate", "hello"]) == 0
    assert capsys.readouterr().out == "[hello]\n"


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
def test_sampling_is_the_models_unless_given(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    """O-75."""
    engine.sampling_defaults = {"temperature": 0.2, "top_p": 0.9}
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main([*command, "--max-tokens", "5", "--temperature", "0.7"]) == 0
    assert engine.last_params == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5)


def test_generate_prints_as_it_comes(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[float, str]] = []

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            written.append((time.monotonic(), text))
            return len(text)

    engine.seconds_per_token = 0.02
    monkeypatch.setattr("sys.stdout", Output())
    assert main(["generate", "hello"]) == 0
    times = [when for when, text in written if text]
    assert len(times) >= 8 and times[-1] - times[0] > 0.1


def test_a_refused_prompt(engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """O-62"""
    assert main(["generate", "--raw", "x" * 1000]) == 2
    assert "jpaged generate: error: the prompt has 1000 tokens" in capsys.readouterr().err


def test_chat_remembers_until_it_is_cleared(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = io.StringIO("one\n\n  two  \n/clear\nthree\n/exit\nnever\n")
    assert chat(monkeypatch, lines) == 0
    one = "[<user>one\n<assistant>]"
    two = f"[<user>one\n<assistant>{one}\n<user>two\n<assistant>]"
    three = "[<user>three\n<assistant>]"
    assert capsys.readouterr().out == f"{one}\n{two}\n{three}\n"


def test_chat_ends_with_its_input(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, io.StringIO("one")) == 0
    assert "one" in capsys.readouterr().out


def test_chat_at_a_terminal_survives_a_refused_message(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "x" * 1000 + "\nagain\n"
    assert chat(monkeypatch, Terminal(lines)) == 0
    output = capsys.readouterr()
    assert "scripted: /exit" in output.out
    assert output.out.count("> ") == 3
    assert "refused: the prompt has" in output.err
    # The refused message is not remembered.
    assert "[<user>again\n<assistant>]" in output.out
    # In a pipe nobody can try again.
    assert chat(monkeypatch, io.StringIO(lines)) == 2


@pytest.fixture
def default_interrupt() -> Iterator[None]:
    """Shells start background jobs with SIGINT ignored, and Python leaves it so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupt")
def test_interrupt_stops_the_answer_only(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        wait_until(lambda: engine.num_generated >= 3, 10)
        os.kill(os.getpid(), signal.SIGINT)
        # Only now: a fast answer could end before the signal gets to the main thread.
        time.sleep(0.2)
        engine.seconds_per_token = 0.0

    engine.seconds_per_token = 0.05
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert chat(monkeypatch, Terminal("first\nsecond\n")) == 0
    thread.join()
    output = capsys.readouterr().out
    assert "(stopped and forgotten)" in output
    assert "[<user>second\n<assistant>]" in output
    assert not engine.running
