"""Ends whatever a run has started, when the run ends in whatever way: a small process of its own watches for that.

Ray's daemons outlive a driver that is killed by seconds or for ever. The watcher holds the reading end of a pipe whose
writing end only the run holds, so it wakes when the run is gone, even by `kill -9`, and then ends the processes that
carry the run's mark in their environment, and no others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

MARK = "STRETTO_RUN_MARK"
"""The variable that everything a run starts inherits."""

MARKS = (MARK, *(f"{MARK}_{number}" for number in range(1, 16)))
"""The same under many names: Ray's agents get their environment in any order and write a title over a half of it."""

WATCH = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)  # sent to all of a job; the run has to save, and then this is needed
from stretto.workers.orphans import end_marked
sys.stdin.buffer.read()
end_marked(sys.argv[1])
"""


class Reaper:
    """Marks this process's children to come, and watches over them."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        # A session of its own: Ctrl-C must not end the watcher before it has done its work. Started before the mark is
        # set, so that it does not end itself.
        self.watcher = subprocess.Popen(
            [sys.executable, "-c", WATCH, self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.environ |= dict.fromkeys(MARKS, self.mark)

    def close(self) -> None:
        """Ends what is left, and the watcher."""
        for name in MARKS:
            os.environ.pop(name, None)
        assert self.watcher.stdin is not None
        self.watcher.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            if self.watcher.wait(timeout=30):  # somebody has killed it before it did its work
                end_marked(self.mark)


def answer_sigterm() -> None:
    """Lets this process answer SIGTERM as before: Ray puts a handler of its own before Python's when it starts, which
    calls that and aborts the process three seconds later."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def end_marked(mark: str, seconds: float = 10.0) -> None:
    """Kills every process that inherited a run's mark, and waits until they are gone."""
    end = time.monotonic() + seconds
    while (processes := marked(mark)) and time.monotonic() < end:
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """Other processes that inherited a run's mark, and whatever they have started."""
    found, parents, needles = set[int](), dict[int, int](), {f"{name}={mark}".encode() for name in MARKS}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent, *_ = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            if state == "Z":
                continue
            parents[int(folder.name)] = int(parent)
            if needles & set((folder / "environ").read_bytes().split(b"\0")):
                found.add(int(folder.name))
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})
