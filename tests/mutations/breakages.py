"""The list of breakages: small changes to the product's code that a test must notice.

They are data: one TOML file for each part of the product, one table for each breakage.

    [name-of-the-breakage]
    breaks = "What goes wrong for users, in one sentence."
    file = "jpaged/scheduling/block_tables.py"
    old = "text that is in the file exactly once"
    new = "what takes its place"
    tests = ["tests/scheduling/test_scheduler.py::test_that_must_fail"]
"""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


@dataclass(frozen=True, kw_only=True)
class Breakage:
    """breaks: its consequence. old, new: the change of the text of `file`.

    tests: node ids; at least one of these tests fails when the change is made.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: list[str]

    def applied_to(self, root: Path) -> str:
        """The changed text of the file. Raises `ValueError` if the change does not fit it."""
        text = (root / self.file).read_text("utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"breakage {self.name}: its old text is in {self.file} {count} times, not once; "
                f"adapt it to the code as it is now:\n{self.old}"
            )
        changed = text.replace(self.old, self.new)
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(text)):
            raise ValueError(f"breakage {self.name} changes nothing in {self.file}")
        return changed


def all_breakages() -> list[Breakage]:
    """All that are listed, in the order of files and tables."""
    found = [each for path in sorted(FOLDER.glob("*.toml")) for each in _read(path)]
    names = [each.name for each in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"breakages of the same name: {', '.join(twice)}")
    return found


def _read(path: Path) -> Iterator[Breakage]:
    for name, fields in tomllib.loads(path.read_text("utf-8")).items():
        try:
            yield Breakage(name=name, **fields)
        except TypeError as error:
            raise ValueError(f"breakage {name} in {path.name}: {error}") from error
