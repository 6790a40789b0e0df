"""Where every process of a run stands, written down in the moment in which a deadline passes.

A process that answers tells its own stacks, from a thread beside the one that hangs. Of one that does not answer, only
what the kernel shows can be told, and only on this host. Nothing is attached to it, and nothing is sent to it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import tempfile
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PATIENCE = 2.0
"""Seconds in which a process that still answers tells its stacks."""

STATES = {
    "R": "running, and does not answer all the same",
    "S": "waiting for something",
    "D": "waiting for the disk or a device, in the kernel",
    "T": "stopped, as by SIGSTOP; kill -CONT lets it go on",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}
"""The kernel's letter for what a process does, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStacks:
    """Where one process stands."""

    who: str
    """The process's device, or what else it is known as."""
    answers: bool
    """False if it said nothing itself."""
    text: str
    """The process's stacks, or what the kernel says of it."""


def own() -> str:
    """The stacks of this process's threads."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def tasks() -> str:
    """What the tasks of this thread's event loop wait for."""
    text = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(limit=3, file=text)
    return text.getvalue()


async def asked(who: str, answer: Awaitable[str], otherwise: str) -> ProcessStacks:
    """What a process says of itself, or `otherwise`."""
    try:
        async with asyncio.timeout(PATIENCE):
            return ProcessStacks(who=who, answers=True, text=await answer)
    except Exception as error:  # it may have died in any way
        why = "it does not answer" if isinstance(error, TimeoutError) else f"it cannot be asked ({error})"
        return ProcessStacks(who=who, answers=False, text=f"{why}; {otherwise}")


def outside(process: int) -> str:
    """What the kernel says of a process of this host."""
    place = Path("/proc") / str(process)
    try:
        state = next(
            line
            for line in (place / "status").read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("State:")
        )
    except (OSError, StopIteration):
        return f"process {process} is gone"
    word = STATES.get(state.split()[1], state)
    with suppress(OSError):
        if (waits := (place / "wchan").read_text(encoding="utf-8")) not in ("", "0"):
            word = f"{word} (in the kernel's {waits})"
    return f"process {process} is {word}"


def page(stands: Sequence[ProcessStacks]) -> str:
    """All of it as a file."""
    return "\n".join(f"=== {stand.who}\n{stand.text.rstrip()}\n" for stand in stands)


def culprits(stands: Sequence[ProcessStacks]) -> str:
    """The processes that do not answer, a line each."""
    return "".join(f"{stand.who}: {stand.text}\n" for stand in stands if not stand.answers)


class StackSource(Protocol):
    """Where every process can be asked for its stacks."""

    async def stacks(self) -> Sequence[ProcessStacks]:
        """Where each of them stands."""
        ...


class StackDump:
    """Writes down where every process stands, once: the first deadline that passes says most."""

    def __init__(self, others: StackSource, folder: Path | None) -> None:
        self.others, self.folder = others, folder
        self.asked: asyncio.Task[str] | None = None

    async def told(self, name: str) -> str:
        """What a message says of it; all of it goes into a file of this name."""
        if self.asked is None:
            self.asked = asyncio.create_task(self._ask(name))
        return await asyncio.shield(self.asked)

    async def _ask(self, name: str) -> str:
        here = ProcessStacks(who="this process", answers=True, text=f"{own()}\n{tasks()}")
        stands = [here, *await self.others.stacks()]
        told = culprits(stands)
        if self.folder is None:
            return told
        path = self.folder / name
        with suppress(OSError):
            path.write_text(page(stands), encoding="utf-8")
            told += f"where every process stands is in {path}\n"
        return told
