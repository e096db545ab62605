"""Shows that the tests notice each breakage: `make test-mutations`.

Applies one breakage after the other to a scratch copy of the working tree, and runs the tests that
are listed with it there. A breakage is caught if one of them fails; that a module cannot be
imported, or a fixture cannot be set up, does not count.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tests.mutations.breakages import ROOT, Breakage, all_breakages

TIMEOUT_SECONDS = 600  # of one breakage: a test that hangs has not caught it
# One process. How long a test takes, here where nothing is compiled yet, is no concern.
PYTEST = ("-m", "pytest", "-q", "-m", "not long", "-p", "no:cpu-seconds")
MOST_CHARACTERS = 160  # of a failure
# Outcomes of pytest. 2 to 5: interrupted, internal error, bad usage, no tests.
PASSED, FAILED = 0, 1
# Errors of a breakage that is no sensible code, which any test would notice.
NO_REASONS = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "UnboundLocalError")


@dataclass(frozen=True)
class Verdict:
    """is_caught: whether a test failed for a good reason. reason: which one, or why not."""

    is_caught: bool
    reason: str
    seconds: float


class ScratchCopy:
    """A copy of the working tree, where tests import the copy's code and no other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in _names_of_files():
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # Links are copied as links: jpaged/models and its like point into the copy.
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        self._check_imports()

    def pytest(self, tests: list[str], *options: str) -> tuple[int | None, str]:
        """Exit code, None if it took too long, and output."""
        process = subprocess.Popen(
            [sys.executable, *PYTEST, *options, *tests],
            cwd=self.root,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        return process.returncode, output

    def judge(self, breakage: Breakage) -> Verdict:
        """Apply the breakage, run its tests, and restore what was there."""
        path = self.root / breakage.file
        text, changed = path.read_text("utf-8"), breakage.applied_to(self.root)
        started = time.monotonic()
        path.write_text(changed, "utf-8")
        try:
            code, output = self.pytest(breakage.tests, "-x", "--tb=short")
        finally:
            path.write_text(text, "utf-8")
        is_caught, reason = judge(code, output)
        return Verdict(is_caught, reason, time.monotonic() - started)

    def _environment(self) -> dict[str, str]:
        # CI: hypothesis tries the same examples each time. No bytecode, which Python would take
        # for that of another file of the same size and second.
        ours = {"CI": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300", "NO_COLOR": "1"}
        return {**os.environ, **ours, "PYTHONPATH": str(self.root)}

    def _check_imports(self) -> None:
        program = "import jpaged, pallas_kernels; print(jpaged.__file__, pallas_kernels.__file__)"
        answer = subprocess.run(
            [sys.executable, "-c", program],
            cwd=self.root.parent,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        for name in answer.stdout.split():
            assert Path(name).is_relative_to(self.root), f"{name} is imported, not {self.root}"


def _names_of_files() -> list[str]:
    """Of all files that git has or would take."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)]


def judge(code: int | None, output: str) -> tuple[bool, str]:
    """Whether a run of pytest shows a failure that the breakage explains, and which one."""
    if code is None:
        return False, f"no answer after {TIMEOUT_SECONDS} s"
    if code == PASSED:
        return False, "all tests pass"
    failure = re.search(r"^FAILED (\S+::.*)$", output, re.MULTILINE)
    if code != FAILED or failure is None:
        return False, f"pytest ended with {code}:\n{output}"
    errors = re.findall(r"^E +(\w+)\b", output, re.MULTILINE)
    # Without an error, the failure is about the test itself, such as the time that it takes.
    is_good = bool(errors) and not set(errors) & set(NO_REASONS)
    return is_good, failure[1] if is_good else f"no sensible code:\n{output}"


def _check_unbroken(copy: ScratchCopy, breakages: list[Breakage]) -> None:
    """Exit with the output of the tests unless all pass without any breakage."""
    tests = list(dict.fromkeys(test for each in breakages for test in each.tests))
    started = time.monotonic()
    code, output = copy.pytest(tests)
    if code != PASSED:
        sys.exit(f"{output}\nThese tests must pass without a breakage.")
    print(f"unbroken: {len(tests)} tests pass, {time.monotonic() - started:.0f} s", flush=True)


def _print_verdict(breakage: Breakage, verdict: Verdict) -> None:
    word = "caught  " if verdict.is_caught else "SURVIVES"
    reason = verdict.reason[:MOST_CHARACTERS] if verdict.is_caught else verdict.reason
    print(f"{word} {verdict.seconds:4.0f} s  {breakage.name:34}  {reason}", flush=True)


def _selected(patterns: list[str]) -> list[Breakage]:
    listed = all_breakages()
    chosen = [each for each in listed if not patterns or _matches(each.name, patterns)]
    return chosen or sys.exit(f"no breakage is named {' or '.join(patterns)}")


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make test-mutations ARGS=...", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the breakages and what they do")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this one; *, ? and [] work"
    )
    options = parser.parse_args()
    breakages = _selected(options.only)
    if options.list:
        for each in breakages:
            print(f"{each.name:34}  {each.breaks}")
        return
    for each in breakages:
        each.applied_to(ROOT)  # a list that is out of date is known before any test runs
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jpaged-mutations-") as folder:
        copy = ScratchCopy(Path(folder).resolve())
        _check_unbroken(copy, breakages)
        survivors = []
        for each in breakages:
            verdict = copy.judge(each)
            _print_verdict(each, verdict)
            survivors += [] if verdict.is_caught else [each.name]
    print(f"{len(breakages) - len(survivors)} of {len(breakages)} breakages are caught, ", end="")
    print(f"{time.monotonic() - started:.0f} s")
    if survivors:
        sys.exit(f"No test notices {', '.join(survivors)}: write one that does.")


if __name__ == "__main__":
    main()
