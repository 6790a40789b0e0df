"""Which cores a run's threads compute on while other programs want the same ones.

Threads that share an operation meet at its end, thousands of times in a step. Where other programs take turns with them
on every core, whoever is early waits until the late one has had its turn. Threads that take turns with each other, on
fewer cores, do not wait so: one computes while the other waits. Linux leaves other programs the rest by itself, for it
evens out how many want each core. So while others keep cores busy, threads keep to as many cores as those leave them,
and spread again when cores stand idle. Nobody gets less than before, and the numbers are the same: how sums are rounded
depends on how many threads there are, not on where they run.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from random import Random
from types import TracebackType
from typing import Self

from stretto.checks.machine.load import CoreUse, core_use
from stretto.openmp import sleeps_at_once
from stretto.placement.plan import Plan

LOOK = 1.0
"""Seconds between two looks at who uses which core."""

TAKEN = 0.45
"""Share of the cores from which on others are taken to want more than they get. Two that want all of two cores get half
beside two threads of ours."""

FULL = 0.9
"""Share of the other cores that others use, or else these stand idle at times and threads spread again."""

TASKS = "/proc/self/task"

Keep = Callable[[Collection[int]], None]
Measure = Callable[[Collection[int]], CoreUse | None]


def core_share(plan: Plan, threads: Mapping[str, int]) -> AbstractContextManager[object]:
    """What keeps the threads of a run to their share, if it computes on one CPU device and its threads sleep as soon as
    they wait. Those that spin would do so on the core that the late one needs."""
    count = threads.get(plan.devices[0], 1)
    if len(plan.devices) > 1 or count < 2 or not sleeps_at_once() or not hasattr(os, "sched_setaffinity"):
        return nullcontext()
    return CoreShare(os.sched_getaffinity(0))


class CoreShare:
    """Keeps the threads of this process that compute to some of its cores."""

    def __init__(
        self,
        cores: Collection[int],
        *,
        measure: Measure = core_use,
        keep: Keep | None = None,
        first: Callable[[int], int] | None = None,
    ) -> None:
        """`first` chooses, of so many cores, where those begin that threads keep to: by chance, or two runs that choose
        the same ones would do so again and again."""
        self.cores: Sequence[int] = sorted(cores)
        self.chosen: Sequence[int] = self.cores
        self.measure, self.keep, self.first = measure, keep or keep_threads, first or Random().randrange
        self.before: CoreUse | None = None
        self.looking: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Chooses the cores by what was used since the last look."""
        before, self.before = self.before, self.measure(self.cores)
        if before is None or self.before is None:
            return
        chosen = self._chosen(before, self.before)
        if chosen != self.chosen:
            self.chosen = chosen
            self.keep(chosen)

    def _chosen(self, before: CoreUse, now: CoreUse) -> Sequence[int]:
        seconds = max(1e-9, now.at - before.at)
        used = {core: (now.used[core] - before.used[core]) / seconds for core in self.cores}
        rest = [core for core in self.cores if core not in self.chosen]
        if rest:
            return self.chosen if sum(used[core] for core in rest) >= FULL * len(rest) else self.cores
        others = sum(used.values()) - (now.own - before.own) / seconds
        if others < TAKEN * len(self.cores):
            return self.cores
        left, first = max(1, round(len(self.cores) - others)), self.first(len(self.cores))
        return sorted((*self.cores[first:], *self.cores[:first])[:left])

    async def _look_on(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK)

    def __enter__(self) -> Self:
        self.looking = asyncio.ensure_future(self._look_on())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.looking is not None:
            self.looking.cancel()
        if self.chosen != self.cores:
            self.keep(self.cores)


def keep_threads(cores: Collection[int]) -> None:
    """Lets the threads of this process compute on these cores, but for its main thread and the calling one: processes
    that those start would be kept there, too."""
    spared = {os.getpid(), threading.get_native_id()}
    for task in map(int, os.listdir(TASKS)):
        if task not in spared:
            with suppress(OSError):  # it has ended meanwhile
                os.sched_setaffinity(task, cores)
