"""Print a table of the CPU seconds of tests by folder, from reports of `make test`.

python -m tests.durations .cache/reports/*.xml
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from tests.cpu_seconds import PROPERTY

README = Path(__file__).parent / "README.md"


def seconds_by_test(paths: Iterable[str]) -> dict[str, float]:
    """CPU seconds of each test, by its dotted path. A test of several reports counts once."""
    seconds = {}
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            for each in case.iter("property"):
                if each.get("name") == PROPERTY:
                    seconds[name] = float(each.get("value", "0"))
    return seconds


def budgets(readme: str) -> dict[str, int]:
    """CPU seconds that a run of `make test` may spend in each folder, from the table there."""
    rows = re.findall(r"^\| `(\S+)` \|.*\| (\d+) \|$", readme, re.MULTILINE)
    return {folder: int(budget) for folder, budget in rows}


def table(seconds: dict[str, float], limits: dict[str, int]) -> list[str]:
    """Lines of a Markdown table, the slowest folder first; folders above their budget say so."""
    folders: dict[str, list[float]] = defaultdict(list)
    for name, each in seconds.items():
        parts = name.split("::")[0].split(".")
        folders[f"{parts[1]}/" if len(parts) > 2 else "*.py"].append(each)
    rows = sorted(folders.items(), key=lambda item: -sum(item[1]))
    lines = [
        "| Folder | Tests | CPU seconds | Slowest | Budget |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, each in rows:
        limit = limits.get(name, 0)
        over = " EXCEEDED" if sum(each) > limit else ""
        figures = f"{len(each)} | {sum(each):.0f} | {max(each):.1f} | {limit}{over}"
        lines.append(f"| `{name}` | {figures} |")
    total = sum(seconds.values())
    return [*lines, f"| all | {len(seconds)} | {total:.0f} | | {sum(limits.values())} |"]


def main(paths: list[str]) -> None:
    seconds = seconds_by_test(paths)
    print("\n".join(table(seconds, budgets(README.read_text("utf-8")))))
    print("\nSlowest:")
    for name, each in sorted(seconds.items(), key=lambda item: -item[1])[:25]:
        print(f"{each:7.1f} {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
