"""Counts each test's CPU seconds, and fails an unmarked one that takes too many."""

import os
from collections.abc import Generator
from typing import Any

import pytest

MOST_CPU_SECONDS = 15
MOST_IF_SLOW = 120
PROPERTY = "cpu_seconds"
_phases = pytest.StashKey[dict[str, float]]()


class CpuSeconds:
    """A pytest plugin: writes `cpu_seconds` of setup and call into the report of every test.

    CPU seconds are those of the whole process and of children that it has waited for, so that a
    busy machine does not change them much. What a test's fixtures do belongs to the first test
    that asks for them.
    """

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        item.stash[_phases] = {}
        return (yield from _measured(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        try:
            return (yield from _measured(item, "call"))
        finally:
            total = sum(item.stash[_phases].values())
            item.user_properties.append((PROPERTY, round(total, 3)))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        report = yield
        if report.when == "call" and report.passed and not item.get_closest_marker("long"):
            phases = item.stash[_phases]
            most = MOST_IF_SLOW if item.get_closest_marker("slow") else MOST_CPU_SECONDS
            if sum(phases.values()) > most:
                report.outcome = "failed"
                report.longrepr = _complaint(item.nodeid, phases, most)
        return report


def _measured(item: pytest.Item, phase: str) -> Generator[None, Any, Any]:
    before = _cpu_seconds()
    try:
        return (yield)
    finally:
        item.stash[_phases][phase] = _cpu_seconds() - before


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _complaint(name: str, phases: dict[str, float], most: int) -> str:
    parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items())
    return (
        f"{name} took {sum(phases.values()):.1f} CPU seconds ({parts}), and may take {most}; "
        f"unmarked tests may take {MOST_CPU_SECONDS}, those marked `slow` {MOST_IF_SLOW}. "
        "Make it smaller: fewer layers, tokens or examples, or an engine that other tests have "
        "made already. If it cannot be smaller, mark it `@pytest.mark.long`, and leave a small "
        "one of its kind for `make test`."
    )
