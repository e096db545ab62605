"""Progress bars for work that takes long enough to wonder about."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(
    total: int, description: str, *, unit: str = "B", shown: bool = True
) -> Iterator[Callable[[int], None]]:
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
