"""What keeps `make test` short and continuous integration complete, tried on tests made here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations, slices

ROOT = Path(__file__).parent.parent
CONFTEST = """
from tests import cpu_seconds, slices

cpu_seconds.MOST_CPU_SECONDS = 0.2

def pytest_addoption(parser):
    slices.add_option(parser)

def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes minutes")
    config.pluginmanager.register(cpu_seconds.CpuSeconds())

def pytest_collection_modifyitems(config, items):
    slices.deselect_others(config, items)
"""
TESTS = """
import time
import pytest

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture
def slow_fixture():
    work(0.3)

def test_quick():
    pass

def test_slow():
    work(0.3)

def test_with_a_slow_fixture(slow_fixture):
    pass

def test_asleep():
    time.sleep(0.3)

@pytest.mark.long
@pytest.mark.parametrize("number", range(12))
def test_long(number):
    work(0.03 * number)
"""


def run(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_made.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *options, "."]
    shown = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    return shown.stdout + shown.stderr


def test_an_unmarked_test_may_take_few_cpu_seconds(tmp_path: Path) -> None:
    """Seconds of its fixtures count, seconds of waiting and of marked tests do not."""
    shown = run(tmp_path)
    failed = [line for line in shown.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 2, shown
    assert "test_slow" in failed[0] and "test_with_a_slow_fixture" in failed[1]
    assert "and may take 0.2" in shown


@pytest.mark.parametrize("count", [1, 3])
def test_slices_have_every_long_test_once(tmp_path: Path, count: int) -> None:
    seen = []
    for number in range(1, count + 1):
        shown = run(tmp_path, "-m", "long", "--slice", f"{number}/{count}")
        seen += [line for line in shown.splitlines() if line.startswith("PASSED")]
    assert len(seen) == len(set(seen)) == 12, seen


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", ""])
def test_wrong_slices_are_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"--slice must be K/N with K from 1 to N"):
        slices.parse(text)


def test_every_folder_has_a_budget() -> None:
    """Together they are what two cores do in the time that `make test` may take."""
    folders = {f"{path.parent.name}/" for path in ROOT.glob("tests/*/test_*.py")}
    budgets = durations.budgets(durations.README.read_text("utf-8"))
    assert set(budgets) == folders | {"*.py"}
    assert sum(budgets.values()) <= 1400


def test_durations_are_shown_by_folder(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    run(tmp_path, "-k", "slow", f"--junitxml={report}")
    seconds = durations.seconds_by_test([str(report)])
    assert len(seconds) == 2 and all(0.2 < each < 3 for each in seconds.values())
    named = {f"tests.engine.test_made::{name}": each for name, each in seconds.items()}
    shown = "\n".join(durations.table(named, {"engine/": 1}))
    assert "| `engine/` | 2 | " in shown and "| all | 2 | " in shown
    assert ("EXCEEDED" in shown) == (sum(seconds.values()) > 1)
