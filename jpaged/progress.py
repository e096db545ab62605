"""Progress of work that takes long enough to wonder about, and the way to stop it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

Advance = Callable[[int], None]


class WorkCancelledError(Exception):
    """Raised in the work itself, once `Progress.cancel` has been called."""


class Progress:
    """How far long work has come. The work reports to it, and is stopped through it."""

    def __init__(self, *, shown: bool = True) -> None:
        self._shown = shown
        self._is_cancelled = False

    def cancel(self) -> None:
        """Let the work end at its next report. Thread-safe."""
        self._is_cancelled = True

    def check(self) -> None:
        """Raise `WorkCancelledError` if the work has been cancelled."""
        if self._is_cancelled:
            raise WorkCancelledError

    @contextmanager
    def bar(self, total: int, description: str, *, unit: str = "B") -> Iterator[Advance]:
        """A `progress_bar`; reports raise `WorkCancelledError` if the work has been cancelled."""
        self.check()
        with progress_bar(total, description, unit=unit, shown=self._shown) as advance:

            def report(amount: int) -> None:
                self.check()
                advance(amount)

            yield report


@contextmanager
def progress_bar(
    total: int, description: str, *, unit: str = "B", shown: bool = True
) -> Iterator[Advance]:
    """A bar with size and rate on standard error, only when that is a terminal.

    Yields a function to call with the amount of work just done; threads may call it.
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    with tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=True,
        disable=not (shown and is_terminal),
        file=sys.stderr,
        dynamic_ncols=True,
    ) as bar:
        yield lambda amount: _advance(bar, amount)


def _advance(bar: tqdm, amount: int) -> None:
    with bar.get_lock():
        bar.update(amount)
