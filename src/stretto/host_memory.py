"""Memory of this host that is ours to use: a container's share of it, where there is one."""

from __future__ import annotations

import os
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
"""Where the kernel tells what a container may use."""


def total(groups: Path = GROUPS) -> int:
    """Bytes that there are."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(host, limit_of_group(groups) or host)


def free(groups: Path = GROUPS) -> int:
    """Bytes that nobody uses."""
    host = _named(Path("/proc/meminfo"), "MemAvailable:") * 1024 or total(groups)
    limit, used = limit_of_group(groups), _number(groups / "memory.current") or 0
    if limit is None:
        return host
    return max(0, min(host, limit - used + _named(groups / "memory.stat", "inactive_file")))


def limit_of_group(groups: Path) -> int | None:
    """Bytes that a container may use; none where there is no limit."""
    return _number(groups / "memory.max") or _number(groups / "memory/memory.limit_in_bytes")


def _number(path: Path) -> int | None:
    """The number that is all of a file."""
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return None


def _named(path: Path, name: str) -> int:
    """The number behind a word of a file; 0 where it cannot be read."""
    try:
        words = [line.split() for line in path.read_text("ascii").splitlines()]
    except (OSError, ValueError):
        return 0
    return next((int(line[1]) for line in words if line[:1] == [name]), 0)
