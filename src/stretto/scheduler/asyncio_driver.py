"""Drives a step in the real world: starts what it offers, waits for whatever ends first, and tells it.

The other driver is `stretto.scheduler.simulator`. This one notes what it told the step and when, so that the decisions
of a real step can be made again from its notes (`replay`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from stretto.errors import TrainingError, WorkerLost
from stretto.scheduler.records import (
    ApplyUpdate,
    BufferedGroup,
    GroupStart,
    MoveRollouts,
    RolloutId,
    SplitUpdates,
    StageWork,
    StartRollouts,
    Work,
)
from stretto.scheduler.state import StepState


class Executor(Protocol):
    """What carries the work out. Each call returns when that is done; a cell that died raises `WorkerLost`."""

    async def generate(self, item: RolloutId, cell: str) -> int:
        """Runs a trajectory that begins on a cell; returns its sampled tokens, 0 if it failed."""
        ...

    def move(self, move: MoveRollouts) -> None:
        """Lets trajectories go on elsewhere."""
        ...

    async def judge(self, item: RolloutId) -> None:
        """Lets reward functions run on a trajectory that has ended."""
        ...

    async def verdict(self, index: int) -> Sequence[int]:
        """Judges a group whose trajectories have ended; returns the attempts to train on."""
        ...

    async def piece(self, piece: StageWork) -> None:
        """Scores or trains."""
        ...

    async def divide(self, groups: Sequence[int]) -> Sequence[Sequence[RolloutId]]:
        """The trajectories of each update."""
        ...

    async def apply(self, groups: Sequence[int], *, last: bool) -> None:
        """Reduces and updates; publishes after the last update."""
        ...

    def more(self, missing: int) -> Sequence[GroupStart]:
        """Another round for groups that were dropped, or nothing."""
        ...

    async def restart_worker(self, device: str) -> None:
        """Brings back a device's process that died."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a step was told."""

    at: float
    """When."""
    what: str
    """Name of the method of `StepState`."""
    arguments: tuple[Any, ...]
    """What it was called with."""


@dataclass(slots=True)
class EventLog:
    """What a step was told, and what it decided each time."""

    told: list[Event] = field(default_factory=list)
    """In order."""
    offers: list[tuple[int, float, tuple[Work, ...]]] = field(default_factory=list)
    """(how much it had been told, when it was asked, what it offered)."""


class Driver:
    """One step under way."""

    def __init__(self, step: StepState, executor: Executor, *, now: Callable[[], float]) -> None:
        self.step, self.executor, self.now = step, executor, now
        self.notes = EventLog()
        self.tasks: dict[asyncio.Task[Any], tuple[int, Callable[[Any], None], str | None]] = {}
        # Those that are done since somebody looked; `asyncio.wait` would register with all of them each time.
        self.done: list[asyncio.Task[Any]] = []
        self.woken = asyncio.Event()
        self.generating: dict[RolloutId, asyncio.Task[int]] = {}
        # Revivals, and what to do with a death that ends one.
        self.reviving: dict[asyncio.Task[Any], Callable[[WorkerLost], None]] = {}
        # Devices whose processes have died and are not back. A cell of several is dead while any of its own is missing.
        self.gone: set[str] = set()
        self.started = 0
        self.over = False

    async def run(self, launches: Sequence[GroupStart], carried: Sequence[BufferedGroup] = ()) -> EventLog:
        """From the first launch to the update. Where nothing is launched, the step trains on what is carried."""
        if carried:
            self._tell("carry", tuple(carried))
        if launches:
            self._tell("launch", tuple(launches))
        else:
            self._tell("close")
        try:
            while not self.over:
                self._start()
                assert self.tasks, "the step is not over, and nothing is under way"
                await self.woken.wait()
                self.woken.clear()
                done, self.done = [task for task in self.done if task in self.tasks], []
                for task in sorted(done, key=lambda task: self.tasks[task][0]):
                    if task in self.tasks:  # unless the one before it told of a death that it shares
                        self._finish(task)
        finally:
            await self._cancel()
        return self.notes

    def _tell(self, what: str, *arguments: Any) -> None:
        self.notes.told.append(Event(at=self.now(), what=what, arguments=arguments))
        getattr(self.step, what)(*arguments)

    def _start(self) -> None:
        now = self.now()
        works = tuple(self.step.offer(now))
        self.notes.offers.append((len(self.notes.told), now, works))
        for work in works:
            match work:
                case StartRollouts():
                    for item in work.items:
                        self.generating[item] = self._begin(
                            self.executor.generate(item, work.cell), partial(self._ended, item)
                        )
                case MoveRollouts():
                    self.executor.move(work)
                case StageWork():
                    self._begin(self.executor.piece(work), partial(self._done, work), work.cell)
                case SplitUpdates():
                    self._begin(self.executor.divide(work.groups), self._divided)
                case ApplyUpdate():
                    self._begin(self.executor.apply(work.groups, last=work.last), partial(self._applied, work.last))

    def _begin(
        self, work: Coroutine[Any, Any, Any], then: Callable[[Any], None], cell: str | None = None
    ) -> asyncio.Task[Any]:
        self.started += 1
        task = asyncio.ensure_future(work)
        self.tasks[task] = (self.started, then, cell)
        task.add_done_callback(self._wake)
        return task

    def _wake(self, task: asyncio.Task[Any]) -> None:
        self.done.append(task)
        self.woken.set()

    def _finish(self, task: asyncio.Task[Any]) -> None:
        _, then, _ = self.tasks.pop(task)
        again = self.reviving.pop(task, None)
        try:
            result = task.result()
        except WorkerLost as lost:
            self._lost(lost.cell)
            if again is not None:
                again(lost)
        else:
            then(result)

    def _lost(self, device: str) -> None:
        """The process of a device has died: nobody waits any more for what its cells had. One that has none here is
        brought back after the step, which would not wait for that."""
        cells = [cell.name for cell in self.step.plan.cells if device in (cell.name, *cell.devices)]
        if device in self.gone or not cells:
            return
        self.gone.add(device)
        lanes = [self.step.lanes.lanes[cell] for cell in cells if cell in self.step.lanes.lanes]
        mine = {self.generating.pop(item) for lane in lanes for item in lane.active}
        mine |= {task for task, (_, _, where) in self.tasks.items() if where in cells}
        for task in mine & self.tasks.keys():
            del self.tasks[task]
            task.cancel()
        for cell in cells:
            if cell not in self.step.cells.dead:
                self._tell("lost", cell)
        self._restart(device)

    def _restart(self, device: str) -> None:
        task = self._begin(self.executor.restart_worker(device), partial(self._back, device))
        self.reviving[task] = partial(self._died_again, device)

    def _died_again(self, device: str, lost: WorkerLost) -> None:
        """What to do when a death ended a revival: it is begun anew, unless the device itself has died."""
        if lost.cell == device:
            told = f"{device}: its process died again while it was brought back ({lost.why})"
            raise TrainingError(f"{told}; see why, for example too little memory, and resume the run")
        self._restart(device)

    def _back(self, device: str, _: None) -> None:
        self.gone.discard(device)
        for cell in self.step.plan.cells:
            own = {cell.name, *cell.devices}
            if device in own and not self.gone & own:
                self._tell("back", cell.name)

    def _done(self, piece: StageWork, _: None) -> None:
        self._tell("done", piece)

    def _ended(self, item: RolloutId, tokens: int) -> None:
        self.generating.pop(item)
        self._tell("ended", item, tokens, self.now())
        self._begin(self.executor.judge(item), lambda _: None)
        if not self.step.groups[item[0]].unfinished:
            self._begin(self.executor.verdict(item[0]), partial(self._judged, item[0]))

    def _judged(self, index: int, attempts: Sequence[int]) -> None:
        self._tell("judged", index, tuple(attempts))
        self._settle_rounds()

    def _settle_rounds(self) -> None:
        """Once every group is decided, either others are launched for those that are missing, or the step is closed."""
        missing = self.step.missing
        if missing is None or self.step.closed:
            return
        more = tuple(self.executor.more(missing)) if missing else ()
        if more:
            self._tell("launch", more)
        else:
            self._tell("close")

    def _divided(self, parts: Sequence[Sequence[RolloutId]]) -> None:
        self._tell("divided", tuple(map(tuple, parts)))

    def _applied(self, last: bool, _: None) -> None:
        if not last:
            self._tell("updated")
        self.over = last

    async def _cancel(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def replay(step: StepState, notes: EventLog) -> list[tuple[Work, ...]]:
    """Tells a fresh step what another was told, at the same times; returns what it offers."""
    told, offers = 0, []
    for count, now, _ in notes.offers:
        for event in notes.told[told:count]:
            getattr(step, event.what)(*event.arguments)
        told = count
        offers.append(tuple(step.offer(now)))
    return offers
