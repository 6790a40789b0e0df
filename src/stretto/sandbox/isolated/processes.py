"""What the kernel says of processes: who started whom, how many there are, and how much memory they hold together.

`proc` is the host's /proc as an open folder, because a keeper may be where no path leads to it; -1 where there is none.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress

SHARE = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
"""A process's share of the memory that lies in no file, private and shared, in its smaps_rollup."""
REACHED = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
"""All of it that a process reaches, in its status."""


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


def exceeds(most: int, proc: int) -> bool:
    """True if everything that this process has started holds more bytes than `most`; what they share counts once.

    The kernel takes a while to say that, so it is asked only where all that they can reach would be more.
    """
    reached = {each: _pages(each, proc) for each in list(family(os.getpid(), proc))[1:]}
    if sum(resident for resident, _ in reached.values()) <= most:
        return False
    held = 0
    for each, (resident, shared) in sorted(reached.items(), key=lambda told: -told[1][0]):
        held += _held(each, resident - shared, proc)
        if held > most:
            return True
    return False


def _pages(pid: int, proc: int) -> tuple[int, int]:
    """Bytes that a process reaches, and those of them that are a file's or shared memory."""
    _, resident, shared, *_ = [*map(int, read(proc, f"{pid}/statm").split()), 0, 0, 0]
    return resident * resource.getpagesize(), shared * resource.getpagesize()


def _held(pid: int, private: int, proc: int) -> int:
    """A process's share of the memory that is no file's; where the kernel says none, all of it that it reaches."""
    told = SHARE.findall(read(proc, f"{pid}/smaps_rollup")) or REACHED.findall(read(proc, f"{pid}/status"))
    return sum(map(int, told)) * 1024 if told else private


def threads_of(uid: int, proc: int) -> int:
    """Threads of a user, because the limit on processes counts those; roughly, where programs share their user."""
    count = 0
    for name in os.listdir(proc) if proc >= 0 else ():
        with suppress(OSError):
            if name.isdigit() and os.stat(name, dir_fd=proc).st_uid == uid:
                count += os.stat(f"{name}/task", dir_fd=proc).st_nlink - 2  # a folder for each thread
    return count
