"""Benchmarks are commands of `jpaged bench`, and nothing else runs one."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import jpaged.bench
from jpaged.cli.bench import BENCHMARKS, BenchmarkCommand

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
