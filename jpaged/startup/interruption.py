"""Ends the process at any moment of a start, whatever its threads are doing.

XLA cannot be told to stop compiling, and an exception that a signal raises may be swallowed by the
code that it interrupts. So these signals raise nothing: their handler cleans up and leaves.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
TERMINATED = 143  # 128 + SIGTERM

_cleanups: list[Callable[[], None]] = []


@contextlib.contextmanager
def ended_by_signals(*, sigterm_code: int = TERMINATED) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process, as `end_process` does, while the context lasts."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Only the main thread may set handlers.
        return

    def handle(signal_number: int, frame: FrameType | None) -> None:
        end_process(signal_number, sigterm_code=sigterm_code)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_process(signal_number: int, *, sigterm_code: int = TERMINATED) -> None:
    """Run the clean-ups and leave without waiting for any thread; call it in the main thread.

    A second signal, should a clean-up take long, kills at once.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _clean_up()
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if os.isatty(sys.stderr.fileno()):
            os.write(sys.stderr.fileno(), b"\n")  # behind a progress bar, or ^C
    os._exit(INTERRUPTED if signal_number == signal.SIGINT else sigterm_code)


@contextlib.contextmanager
def cleaned_up(cleanup: Callable[[], None]) -> Iterator[None]:
    """Call `cleanup` at the end of the context, or when the process ends before.

    It may be called twice, by two threads, and must not raise.
    """
    _cleanups.append(cleanup)
    try:
        yield
    finally:
        _cleanups.remove(cleanup)
        cleanup()


@atexit.register
def _clean_up() -> None:
    for cleanup in reversed(_cleanups.copy()):
        cleanup()
