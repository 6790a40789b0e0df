"""Which cores a run's threads compute on while other programs want the same ones.

Threads that share an operation meet at its end, thousands of times in a step. Where other programs take turns with them
on every core, whoever is early waits until the late one has had its turn. Threads that take turns with each other, on
half of the cores, do not wait so: one computes while the other waits. Linux leaves other programs the other half by
itself, for it evens out how many want each core. So as long as others fill that half, a run that competes for all cores
keeps to one, and when it stands idle, spreads over all and tries again later. Numbers are the same: how sums are
rounded depends on how many threads there are, not on where they run.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from random import Random
from types import TracebackType
from typing import Self

from stretto.checks.machine.facts import cores, neighbors_together, shown
from stretto.checks.machine.load import seconds_idle
from stretto.openmp import sleeps_at_once
from stretto.placement.plan import Plan

LOOK = 1.0
"""Seconds between two looks at the other half."""

IDLE = 0.5
"""Share of its time for which the other half may have nothing to do; beyond it there is more to win than lost."""

PAUSE, LONGEST = 30.0, 300.0
"""Seconds until half of the cores are tried again, at first, and if the other half stood idle again and again."""

SET = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which a user says how many threads there are, or where they compute."""

TASKS = "/proc/self/task"


def core_share(plan: Plan, threads: Mapping[str, int]) -> AbstractContextManager[object]:
    """What keeps the threads of a run to their share of the cores, where it competes for them: on one CPU device, with
    threads that sleep as soon as they wait, for those that spin would do so on the core that the late one needs.

    An engine in a process of its own fills cores itself, and is not another program that waits for its turn.
    """
    device, count = plan.devices[0], shown()
    takes_all = len(plan.devices) == 1 and threads.get(device) == count == cores() > 1  # no quota of a container's
    apart = any(cell.engine in ("vllm", "sglang") for cell in plan.cells)
    if not takes_all or apart or not sleeps_at_once() or any(os.environ.get(name) for name in SET):
        return nullcontext()
    if not hasattr(os, "sched_setaffinity") or seconds_idle(mine := os.sched_getaffinity(0)) is None:
        return nullcontext()
    return CoreShare(neighbors_together(mine), move=partial(move_threads, device))


class CoreShare:
    """Keeps threads to half of the cores while others fill the other half."""

    def __init__(
        self,
        cores: Sequence[int],
        *,
        move: Callable[[Collection[int], Collection[int]], None],
        idle: Callable[[Collection[int]], float | None] = seconds_idle,
        clock: Callable[[], float] = time.monotonic,
        second: Callable[[], bool] | None = None,
    ) -> None:
        """`cores` are divided in this order; `move` brings threads from some to others, `idle` tells how long cores
        have been idle so far, and `second` chooses the second half: by chance, or two runs would choose the same one
        again and again."""
        self.cores: Sequence[int] = cores
        self.move, self.idle, self.clock = move, idle, clock
        self.second = second or (lambda: Random().random() < 0.5)
        self.kept: Sequence[int] = self.cores
        self.before: tuple[float, float | None] = (0.0, None)
        self.pause = PAUSE
        self.looking: asyncio.Task[None] | None = None

    def look(self) -> float:
        """Keeps threads to half of the cores or spreads them, and says in how many seconds to look again."""
        if not self.rest:
            half = len(self.cores) // 2  # for the others; an odd core is not among them
            self._go(self.cores[half:] if self.second() else self.cores[:-half])
            self.before = self.clock(), self.idle(self.rest)
            return LOOK
        if self._is_filled():
            self.pause = PAUSE
            return LOOK
        self.spread()
        pause, self.pause = self.pause, min(2 * self.pause, LONGEST)
        return pause

    def _is_filled(self) -> bool:
        """Whether others have filled the other half since the last look."""
        (then, idle_then), (now, idle_now) = self.before, (self.clock(), self.idle(self.rest))
        self.before = now, idle_now
        if idle_then is None or idle_now is None:
            return False
        return idle_now - idle_then <= IDLE * len(self.rest) * (now - then)

    @property
    def rest(self) -> Sequence[int]:
        """The other half; none while threads are spread."""
        return [core for core in self.cores if core not in self.kept]

    def spread(self) -> None:
        """Threads may compute on every core."""
        if self.rest:
            self._go(self.cores)

    def _go(self, cores: Sequence[int]) -> None:
        self.move(self.kept, cores)
        self.kept = cores

    async def _look_on(self) -> None:
        try:
            while True:
                await asyncio.sleep(self.look())
        finally:
            self.spread()

    def __enter__(self) -> Self:
        self.looking = asyncio.ensure_future(self._look_on())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.looking is not None:
            self.looking.cancel()
        self.spread()


def move_threads(device: str, before: Collection[int], cores: Collection[int]) -> None:
    """Lets a device's thread and those that compute for it, which Python does not know, run on these cores. All others
    stay where they are, for processes that they start would be kept there, too; but whoever was begun by a thread that
    was kept to the cores of `before` is let go with it."""
    others = {thread.native_id for thread in threading.enumerate() if not thread.name.startswith(device)}
    for task in map(int, os.listdir(TASKS)):
        with suppress(OSError):  # it has ended meanwhile
            kept = len(before) < len(cores) and os.sched_getaffinity(task) == set(before)
            if kept or task not in others:
                os.sched_setaffinity(task, cores)
