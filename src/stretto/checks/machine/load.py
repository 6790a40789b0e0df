"""How much of the machine others use, and how many threads a run of one CPU device takes beside them.

Only a moment is looked at, twice, and the quieter counts, so that a burst is not taken for load. It is looked at when a
run starts and not again: the number of threads decides how sums are rounded, and is not to change within a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
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
        before = _used(stat)
        sleep(MOMENT)
        after = _used(stat)
        if before is None or after is None:
            return 0.0
        (begun, all_then, mine_then), (now, all_now, mine_now) = before, after
        seen.append(((all_now - all_then) - (mine_now - mine_then)) / max(1e-9, now - begun))
    return max(0.0, min(seen))


def _used(stat: Path) -> tuple[float, float, float] | None:
    """The time, seconds for which the cores of this process have been in use, and for which by itself."""
    try:
        text = stat.read_text(encoding="ascii")
        mine = os.sched_getaffinity(0)
        each = seconds_in_use(text, mine, ticks=os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError):
        return None
    own = os.times()
    return time.monotonic(), each, own.user + own.system + own.children_user + own.children_system


def seconds_in_use(text: str, cores: Collection[int], *, ticks: int) -> float:
    """Seconds for which these cores were not idle, by the kernel's table of all."""
    total = 0
    for core, (user, nice, system, _, _, interrupts, soft) in _times(text).items():
        if core in cores:
            total += user + nice + system + interrupts + soft
    return total / ticks


def seconds_idle(cores: Collection[int], stat: Path = STAT) -> float | None:
    """Seconds for which these cores, all together, had nothing to do, or only what steps back for this process; none
    where the system does not tell of each."""
    try:
        times = _times(stat.read_text(encoding="ascii"))
        polite = os.getpriority(os.PRIO_PROCESS, 0) <= 0  # niced programs step back, unless this one is niced itself
        rows = [times[core] for core in cores]
        idle = [idle + waiting + nice * polite for _, nice, _, idle, waiting, *_ in rows]
    except (OSError, ValueError, LookupError):
        return None
    told = any(map(any, rows))  # a sandbox may show a table of zeros
    return sum(idle) / os.sysconf("SC_CLK_TCK") if told else None


def _times(text: str) -> dict[int, tuple[int, ...]]:
    """Core -> what the kernel's table says of it: user, nice, system, idle, waiting, interrupts, soft ones."""
    rows = [line.split() for line in text.splitlines() if line[:3] == "cpu" and line[3:4].isdigit()]
    return {int(name[3:]): tuple(map(int, numbers[:7])) for name, *numbers in rows}
