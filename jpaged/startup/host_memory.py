"""How much memory this process may use: that of the machine, or less in a container."""

import os
from collections.abc import Iterator
from pathlib import Path

# Name of the limit's file in a control group, and where groups are mounted: version 2, alone or
# beside version 1, and version 1.
_CGROUP_MOUNTS = {
    "unified": ("memory.max", ("sys/fs/cgroup", "sys/fs/cgroup/unified")),
    "memory": ("memory.limit_in_bytes", ("sys/fs/cgroup/memory",)),
}


def host_memory_limit(root: Path = Path("/")) -> int:
    """Bytes: the machine's memory, or the tightest limit of a control group that holds the
    process. root: where /proc and /sys are found."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Limits of the process's groups and of their parents, all of which hold."""
    for hierarchy, group in _groups(root):
        file_name, mounts = _CGROUP_MOUNTS[hierarchy]
        for mount in mounts:
            # In a container the group's path may be the host's, while its own files are mounted
            # at the top: of a path that is not there, the parents that are there count.
            for path in (group, *group.parents):
                limit = _read_limit(root / mount / path / file_name)
                if limit is not None:
                    yield limit


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Hierarchies that limit memory, and the process's group in them, relative to the mount."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, ValueError):  # no control groups on this system
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        path = Path(group.lstrip("/"))
        if number == "0" and not controllers:
            yield "unified", path
        elif "memory" in controllers.split(","):
            yield "memory", path


def _read_limit(path: Path) -> int | None:
    """None without a limit: version 2 says "max" then, version 1 a number beyond any machine."""
    try:
        return int(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
