"""What a start has made when the process ends, at the moments that a real signal rarely meets.

Each script makes the file that it is given, and ends.
"""

import subprocess
import sys
from pathlib import Path

import pytest

END_TIMEOUT_S = 60

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
AFTER_AN_ERROR = """
import signal, sys, threading, time
from pathlib import Path
from jpaged.startup.interruption import cleaned_up, end_process

path = Path(sys.argv[1])
is_removing = threading.Event()

def make():
    path.touch()
    return path

def remove(path):
    if threading.current_thread() is not threading.main_thread():
        is_removing.set()
        time.sleep(60)
    path.unlink()

def fail():
    with cleaned_up(make, remove):
        raise OSError("No space left on device")

threading.Thread(target=fail, daemon=True).start()
is_removing.wait()
end_process(signal.SIGTERM)
"""
AFTER_A_CLEANUP_THAT_FAILS = """
import signal, sys, threading
from pathlib import Path
from jpaged.startup.interruption import cleaned_up, end_process

path = Path(sys.argv[1])
is_made = threading.Event()

def make():
    path.touch()
    return path

def fail(_):
    raise OSError("Input/output error")

def keep():
    with cleaned_up(make, Path.unlink), cleaned_up(lambda: None, fail):
        is_made.set()
        threading.Event().wait()

threading.Thread(target=keep, daemon=True).start()
is_made.wait()
end_process(signal.SIGTERM)
"""
WHILE_TWO_SIGNALS_COME = """
import os, signal, sys
from pathlib import Path
from jpaged.startup.interruption import cleaned_up, ended_by_signals

path = Path(sys.argv[1])
set_handler = signal.signal

def interrupted(number, handler):
    signal.signal = set_handler
    os.kill(os.getpid(), signal.SIGTERM)
    return set_handler(number, handler)

def make():
    path.touch()
    return path

with ended_by_signals(), cleaned_up(make, Path.unlink):
    signal.signal = interrupted  # The handler of the first signal begins with it.
    os.kill(os.getpid(), signal.SIGTERM)
"""
# The process ends by itself, and gives its threads another second.
BEHIND_THE_END = """
import atexit, sys, threading, time
from pathlib import Path
atexit.register(time.sleep, 1)  # called after the clean-ups
from jpaged.startup.interruption import cleaned_up

path = Path(sys.argv[1])
is_making = threading.Event()

def make():
    is_making.set()
    time.sleep(0.2)
    path.touch()
    return path

def keep(seconds):
    time.sleep(seconds)
    with cleaned_up(make, Path.unlink):
        threading.Event().wait()

for seconds in (0, 0.5):  # begins before the clean-ups, and behind them
    threading.Thread(target=keep, args=[seconds], daemon=True).start()
is_making.wait()
"""


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (IN_MAIN_THREAD, 143),
        (IN_ANOTHER_THREAD, 143),
        (AFTER_AN_ERROR, 143),
        (AFTER_A_CLEANUP_THAT_FAILS, 143),
        (WHILE_TWO_SIGNALS_COME, 143),
        (BEHIND_THE_END, 0),
    ],
    ids=[
        "made by main thread",
        "made by another thread",
        "error",
        "failing clean-up",
        "two signals",
        "end without signal",
    ],
)
def test_what_is_made_while_the_process_ends(tmp_path: Path, script: str, code: int) -> None:
    """O-87: it is removed, whether it was finished before the clean-ups began or not."""
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "made.part")],
        capture_output=True,
        text=True,
        timeout=END_TIMEOUT_S,
    )
    assert process.returncode == code, process.stderr
    assert not process.stdout
    assert not (tmp_path / "made.part").exists()
