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
from functools import partial
from types import FrameType
from typing import TypeVar

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
TERMINATED = 143  # 128 + SIGTERM

T = TypeVar("T")

_cleanups: list[Callable[[], None]] = []
# Held while something is made that a clean-up removes, and by the end of the process for ever.
# Reentrant, since a second signal may interrupt the handler of the first one when that has it.
_making = threading.RLock()
_main_thread_is_making = False
_postponed_end: Callable[[], None] | None = None


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

    A second signal, should a clean-up take long, kills at once. Only while the main thread makes
    something that needs a clean-up, it returns, and the process ends directly afterwards.
    """
    global _postponed_end
    if _main_thread_is_making:
        _postponed_end = partial(end_process, signal_number, sigterm_code=sigterm_code)
        return
    _making.acquire()  # From here on, other threads make nothing: they wait for the end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _clean_up()
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if os.isatty(sys.stderr.fileno()):
            os.write(sys.stderr.fileno(), b"\n")  # behind a progress bar, or ^C
    os._exit(INTERRUPTED if signal_number == signal.SIGINT else sigterm_code)


@contextlib.contextmanager
def cleaned_up(make: Callable[[], T], remove: Callable[[T], None]) -> Iterator[T]:
    """Make something for the context; remove it at its end, or when the process ends before.

    `remove` may be called twice, by two threads. If it raises, it is called again at the end of the
    process.
    """
    with _not_interrupted():
        made = make()
        cleanup = partial(remove, made)
        _cleanups.append(cleanup)
    try:
        yield made
    finally:
        cleanup()
        # Not before it is removed, as the process may end in between.
        with _not_interrupted():
            _cleanups.remove(cleanup)


@contextlib.contextmanager
def _not_interrupted() -> Iterator[None]:
    """Keep the process from ending within the context."""
    global _main_thread_is_making
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread:
        _main_thread_is_making = True
    try:
        with _making:
            yield
    finally:
        if is_main_thread:
            _main_thread_is_making = False
            if _postponed_end is not None:
                _postponed_end()


@atexit.register
def _clean_up_at_exit() -> None:
    """Run the clean-ups at a normal end, which daemon threads do not stop for."""
    _making.acquire()
    _clean_up()


def _clean_up() -> None:
    for cleanup in reversed(_cleanups.copy()):
        # Whatever is wrong with one of them, the others are called, and the process ends.
        with contextlib.suppress(Exception):
            cleanup()
