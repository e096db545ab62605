"""Ctrl-C between the steps of an engine, never within one.

A program that takes over an array's memory has deleted the array before its result is assigned: an
exception at that moment would leave an engine without its KV cache.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Hold back SIGINT, and yield a function that handles the one that came.

    The function calls the handler that was there before, which usually raises `KeyboardInterrupt`.
    So does the end of the context, unless it ends by an exception. In threads other than the main
    one, which no signal interrupts, nothing is held.
    """
    before = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not callable(before):
        yield lambda: None
        return
    held: list[tuple[int, FrameType | None]] = []

    def handle() -> None:
        if held:
            signal_and_frame = held.pop()
            held.clear()
            before(*signal_and_frame)

    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield handle
    finally:
        signal.signal(signal.SIGINT, before)
    handle()
