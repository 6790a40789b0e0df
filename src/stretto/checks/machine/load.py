"""How much of the machine others use, and how many threads a run of one CPU device takes beside them.

Only a moment is looked at, twice, and the quieter counts, so that a burst is not taken for load. It is looked at when a
run starts and not again: the number of threads decides how sums are rounded, and is not to change within a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")

MOMENT = 0.2
"""Seconds of a look. The kernel counts in hundredths."""

COMPETE = 1 / 2
"""Share of the cores in use by others up to which those are left to them. Beyond it, all threads compete for all cores:
few on the idle rest would get less than their share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuShare:
    """What a process takes of its cores."""

    cores: int
    """Cores that it may use."""
    busy: int
    """Cores that others keep busy."""

    @property
    def competes(self) -> bool:
        """True if others use so much that leaving it to them would leave too little."""
        return self.busy > COMPETE * self.cores

    @property
    def threads(self) -> int:
        """Threads to compute with."""
        return self.cores if self.competes else self.cores - self.busy

    def __str__(self) -> str:
        given = f"{self.threads} thread{'' if self.threads == 1 else 's'} on {self.cores} core"
        told = f"{given}{'' if self.cores == 1 else 's'}"
        if not self.busy:
            return told
        kept = f"other programs keep {self.busy} of them busy"
        return f"{told}, for which it competes: {kept}" if self.competes else f"{told}: {kept}"


def cpu_share(cores: int, busy: float) -> CpuShare:
    """The share of so many cores, where others use `busy` of them."""
    return CpuShare(cores=cores, busy=min(cores, int(busy + 0.5)))


def busy_cores(stat: Path = STAT, sleep: Callable[[float], None] = time.sleep) -> float:
    """Cores of this process's that others keep busy; 0 where the system does not tell."""
    seen = []
    for _ in range(2):
        before = core_use(stat=stat)
        sleep(MOMENT)
        after = core_use(stat=stat)
        if before is None or after is None:
            return 0.0
        everybody = sum(after.used.values()) - sum(before.used.values())
        seen.append((everybody - (after.own - before.own)) / max(1e-9, after.at - before.at))
    return max(0.0, min(seen))


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreUse:
    """How long cores have been in use, up to a moment."""

    at: float
    """The moment."""
    used: Mapping[int, float]
    """Core -> seconds for which it was not idle."""
    own: float
    """Seconds that this process has computed, with those of its children that have ended."""


def core_use(cores: Collection[int] | None = None, *, stat: Path = STAT) -> CoreUse | None:
    """How long cores, by default those of this process, have been in use; none where the system does not tell."""
    try:
        text = stat.read_text(encoding="ascii")
        used = seconds_in_use(text, os.sched_getaffinity(0) if cores is None else cores, ticks=os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError):
        return None
    own = os.times()
    return CoreUse(at=time.monotonic(), used=used, own=own.user + own.system + own.children_user + own.children_system)


def seconds_in_use(text: str, cores: Collection[int], *, ticks: int) -> dict[int, float]:
    """Core -> seconds for which it was not idle, by the kernel's table of all."""
    found = {}
    for line in text.splitlines():
        name, *numbers = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _, _, interrupts, soft = map(int, numbers[:7])
            found[int(name[3:])] = (user + nice + system + interrupts + soft) / ticks
    return found
