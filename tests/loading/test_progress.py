import io
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jpaged.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "shown", "is_drawn"),
    [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)],
)
def test_bar_is_drawn_on_terminals_only(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, shown: bool, is_drawn: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with (
        progress_bar(50_000_000, "loading weights", shown=shown) as advance,
        ThreadPoolExecutor(4) as threads,
    ):
        list(threads.map(advance, [1_000_000] * 50))
    drawn = stream.getvalue()
    assert bool(drawn) == is_drawn
    if is_drawn:
        assert "loading weights: 100%" in drawn
        assert "50.0M/50.0M" in drawn
        assert "B/s" in drawn
