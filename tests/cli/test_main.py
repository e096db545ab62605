"""The command line as a process: exit codes, messages, and how quickly help is there."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY_MODULES = {"jax", "fastapi", "transformers", "uvicorn", "pydantic", "numpy"}


def jpaged(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jpaged", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_user_error(result: subprocess.CompletedProcess[str], pattern: str) -> None:
    """O-62: exit code 2 and one line that says what is wrong; no traceback."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    *_, last = result.stderr.splitlines()
    assert re.search(pattern, last), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from jpaged.cli.main import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 0\n"
        f"print('heavy:', sorted({HEAVY_MODULES!r} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "heavy: []", result.stderr


def test_version() -> None:
    assert re.fullmatch(r"jpaged \S+\n", jpaged("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ([], "COMMAND"),
        (["bake"], "'bake'"),
        (["serve", "--block-size", "3.5"], "--block-size"),
        (["serve", "--block-size", "0"], "--block-size"),
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--host", "no.such.host.invalid", "--port", "0"], "no.such.host.invalid"),
        (["generate"], "PROMPT"),
        (["generate", "hi", "--temperature", "-1"], "--temperature"),
        (["generate", "hi", "--model", "/no/such/model"], "/no/such/model"),
        (["chat", "a", "--model", "b"], "two models"),
    ],
)
def test_mistakes(arguments: list[str], pattern: str) -> None:
    assert_user_error(jpaged(*arguments), pattern)


def test_port_in_use_is_found_before_the_model(tmp_path: Path) -> None:
    """O-62: the model does not exist, and is not what the error is about."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = jpaged("serve", str(tmp_path / "no-model"), "--port", str(port))
    assert_user_error(result, f"port {port} .*in use")


def test_server_with_a_bad_model_ends(tmp_path: Path) -> None:
    result = jpaged("serve", str(tmp_path / "no-model"), "--port", "0")
    assert_user_error(result, "no-model")


def test_signal_while_starting_ends_the_server() -> None:
    """The first line of its log comes when it starts to load; it need not end that first."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_START], stdout=subprocess.PIPE, env=os.environ, text=True
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "starting\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0


# The real thing but for the engine's start, which takes for ever.
SLOW_START = """
import asyncio, sys
from jpaged.async_engine import AsyncEngine
from jpaged.cli.main import main

async def start(self):
    print("starting", flush=True)
    await asyncio.sleep(600)

AsyncEngine.start = start
sys.exit(main(["serve", "--port", "0"]))
"""
