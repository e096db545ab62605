"""Print a table of the CPU seconds of tests by folder, from reports of `make test`.

python -m tests.durations .cache/reports/*.xml
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from xml.etree import ElementTree

from tests.cpu_seconds import PROPERTY


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


def table(seconds: dict[str, float]) -> list[str]:
    """Lines of a Markdown table, the slowest folder first."""
    folders: dict[str, list[float]] = defaultdict(list)
    for name, each in seconds.items():
        parts = name.split("::")[0].split(".")
        folders[f"{parts[1]}/" if len(parts) > 2 else "(top)"].append(each)
    rows = sorted(folders.items(), key=lambda item: -sum(item[1]))
    lines = ["| Folder | Tests | CPU seconds | Slowest |", "| --- | --- | --- | --- |"]
    lines += [
        f"| `{name}` | {len(each)} | {sum(each):.0f} | {max(each):.1f} |" for name, each in rows
    ]
    return [*lines, f"| all | {len(seconds)} | {sum(seconds.values()):.0f} | |"]


def main(paths: list[str]) -> None:
    seconds = seconds_by_test(paths)
    print("\n".join(table(seconds)))
    print("\nSlowest:")
    for name, each in sorted(seconds.items(), key=lambda item: -item[1])[:25]:
        print(f"{each:7.1f} {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
