"""Slices of the long tests: a continuous-integration run takes one, a few runs take all."""

from zlib import crc32

import pytest

OPTION = "--slice"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, metavar="K/N", help="of the tests marked long, run the K-th of N slices, K from 1"
    )


def deselect_others(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the long tests of the slice that the option names, and all other tests."""
    text = config.getoption(OPTION)
    if text is None:
        return
    number, count = parse(text)
    kept, others = [], []
    for item in items:
        is_kept = not item.get_closest_marker("long") or slice_of(item.nodeid, count) == number
        (kept if is_kept else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def parse(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"{OPTION} must be K/N with K from 1 to N, got {text!r}")
    return int(number), int(count)


def slice_of(name: str, count: int) -> int:
    """The slice of a test, from 1 to `count`. It stays the same while the test has its name."""
    return crc32(name.encode()) % count + 1
