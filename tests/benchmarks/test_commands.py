"""Benchmarks are commands of `jpaged bench`, and nothing else runs one."""

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

import jpaged.bench
from jpaged.bench import compare_transformers
from jpaged.cli.bench import BENCHMARKS, BenchmarkCommand
from jpaged.startup import interruption
from tests.http.test_disconnect import wait_until

MODULES = sorted(Path(jpaged.bench.__path__[0]).rglob("*.py"))


@pytest.mark.parametrize("command", BENCHMARKS, ids=lambda command: command.name)
def test_every_command_names_a_function(command: BenchmarkCommand) -> None:
    module, _, name = command.function.partition(":")
    assert callable(getattr(import_module(module), name))


def test_nothing_else_runs_a_benchmark() -> None:
    assert MODULES
    assert not [path for path in MODULES if "__main__" in path.read_text("utf-8")]


def test_help_lists_them() -> None:
    command = [sys.executable, "-m", "jpaged", "bench", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(each.name in shown for each in BENCHMARKS)


def test_a_signal_ends_the_process_that_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that process nor its folder of programs stays behind."""
    code = "import sys, time; open(f'{sys.argv[2]}/started', 'w').close(); time.sleep(60)"
    monkeypatch.setattr(compare_transformers, "START_CODE", code)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadPoolExecutor() as pool:
        timing = pool.submit(compare_transformers.print_start_times, "model")
        wait_until(lambda: any(tmp_path.glob("*/started")), 60)
        interruption._clean_up()
        assert "SIGKILL" in str(timing.exception(60))
    assert not list(tmp_path.iterdir())
