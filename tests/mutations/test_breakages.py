"""The list of breakages fits the code and the tests as they are now."""

import ast
from pathlib import Path

import pytest

from tests.mutations.breakages import ROOT, Breakage, all_breakages
from tests.mutations.run import judge

BREAKAGES = all_breakages()


def functions(path: Path) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Of a file, by name; hypothesis' state machines are assigned to names of tests."""
    body = ast.parse(path.read_text("utf-8")).body
    return {each.name: each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef)}


def is_long(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(each) == "pytest.mark.long" for each in node.decorator_list)


def test_the_list_is_long() -> None:
    assert len(BREAKAGES) >= 25


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda each: each.name)
def test_a_breakage_fits_the_code_and_the_tests(breakage: Breakage) -> None:
    breakage.applied_to(ROOT)
    assert breakage.breaks.endswith(".") and breakage.tests
    for test in breakage.tests:
        path, _, name = test.partition("::")
        found = functions(ROOT / path)[name.partition("[")[0]]
        assert not is_long(found), f"{test} is no test of `make test`"


@pytest.mark.parametrize(
    "code,output,is_caught",
    [
        (1, "E   AssertionError: 1 != 2\nFAILED tests/a.py::test_b - AssertionError: 1 != 2", True),
        (0, "1 passed", False),
        (1, "took 99 CPU seconds\nFAILED tests/a.py::test_b", False),
        (1, "E   ValueError: no\nERROR tests/a.py::test_b - ValueError: no", False),
        (1, "E   NameError: x\nFAILED tests/a.py::test_b - NameError: x", False),
        (2, "ERROR tests/a.py - ImportError: no", False),
        (None, "", False),
    ],
    ids=[
        "failure",
        "pass",
        "slow",
        "error-of-a-fixture",
        "no-sensible-code",
        "import-error",
        "hangs",
    ],
)
def test_only_failures_count(code: int | None, output: str, is_caught: bool) -> None:
    assert judge(code, output)[0] == is_caught
