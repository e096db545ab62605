"""What a start has made when a signal ends it, at the moments that a real signal rarely meets."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

IN_MAIN_THREAD = """
import os, signal, sys
from pathlib import Path
from jpaged.startup.interruption import cleaned_up, ended_by_signals

path = Path(sys.argv[1])

def make():
    os.kill(os.getpid(), signal.SIGTERM)  # before there is anything
    path.touch()
    return path

with ended_by_signals(), cleaned_up(make, Path.unlink):
    print("never")
"""
IN_ANOTHER_THREAD = """
import signal, sys, threading, time
from pathlib import Path
from jpaged.startup.interruption import cleaned_up, end_process

path = Path(sys.argv[1])
is_making = threading.Event()

def make():
    is_making.set()
    time.sleep(0.2)
    path.touch()
    return path

def keep():
    with cleaned_up(make, Path.unlink):
        threading.Event().wait()

with cleaned_up(lambda: None, lambda _: time.sleep(1)):  # so that the clean-ups take long
    threading.Thread(target=keep, daemon=True).start()
    is_making.wait()
    end_process(signal.SIGTERM)
"""


@pytest.mark.parametrize("script", [IN_MAIN_THREAD, IN_ANOTHER_THREAD])
def test_what_is_made_while_a_signal_comes(tmp_path: Path, script: str) -> None:
    """It is removed, whether it was finished before the clean-ups began or not."""
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "made.part")], capture_output=True, text=True
    )
    assert process.returncode == 128 + signal.SIGTERM, process.stderr
    assert not process.stdout
    assert not (tmp_path / "made.part").exists()
