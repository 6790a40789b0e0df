"""What the kernel says of processes: who started whom, how many there are, and how much memory they hold together.

`proc` is the host's /proc as an open folder, because a keeper may be where no path leads to it; -1 where there is none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Literal

SHARE = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
"""A process's share of the memory that lies in no file, private and shared, in its smaps_rollup."""
REACHED = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
"""All of it that a process reaches, in its status."""
FEW = 6
"""Processes whose shares are asked for."""
LOOKS = 2
"""Times that shares have to be too much: of one that ends between two of them, the others' grow."""
SLACK = 8
"""Processes more than a program may have end it: where the kernel limits them, its count is not exactly this one."""


def read(proc: int, path: str) -> str:
    """What a file there says; nothing where it cannot be read."""
    if proc < 0:
        return ""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.read(descriptor, 65536).decode("ascii", "replace")
        finally:
            os.close(descriptor)
    return ""


def write(proc: int, path: str, text: str) -> None:
    """OSError where that is not allowed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)


def family(pid: int, proc: int) -> Iterator[int]:
    """The process and everything that it has started and that lives."""
    yield pid
    for thread in _threads(pid, proc):
        for each in read(proc, f"{pid}/task/{thread}/children").split():
            yield from family(int(each), proc)


def _threads(pid: int, proc: int) -> list[str]:
    """Each has children of its own."""
    with suppress(OSError):
        folder = os.open(f"{pid}/task", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)
    return []


def excess(memory: int, processes: int, proc: int) -> Literal["memory", "error"] | None:
    """What is too much of everything that this process has started: its bytes, of which those that are shared count
    once, or its processes, whose number the kernel does not limit for root. None where nothing is.

    The kernel takes a while to say who shares what, the more so the busier they are. So it is asked only where all that
    they can reach would be more, and of few; many are taken to share nothing.
    """
    started = list(islice(family(os.getpid(), proc), 1, processes + SLACK + 2))
    if len(started) > processes + SLACK:
        return "error"
    if sum(_reached(each, proc) for each in started) <= memory:
        return None
    if len(started) > FEW or all(sum(_held(each, proc) for each in started) > memory for _ in range(LOOKS)):
        return "memory"
    return None


def _reached(pid: int, proc: int) -> int:
    return _told(REACHED, read(proc, f"{pid}/status"))


def _held(pid: int, proc: int) -> int:
    """A process's share, or all that it reaches where the kernel does not say that; none of one that has ended."""
    share = read(proc, f"{pid}/smaps_rollup")
    return _told(SHARE, share) if share else _reached(pid, proc)


def _told(sizes: re.Pattern[str], text: str) -> int:
    """The sum of what is found, in bytes."""
    return 1024 * sum(map(int, sizes.findall(text)))


def threads_of(uid: int, proc: int) -> int:
    """Threads of a user, because the limit on processes counts those; roughly, where programs share their user."""
    count = 0
    for name in os.listdir(proc) if proc >= 0 else ():
        with suppress(OSError):
            if name.isdigit() and os.stat(name, dir_fd=proc).st_uid == uid:
                count += os.stat(f"{name}/task", dir_fd=proc).st_nlink - 2  # a folder for each thread
    return count
