"""The generate cells of a plan, as what trajectories ask: a queue each, behind it one process or several in lockstep.

Processes of one cell are called at once, so each gets its calls in the same order; those that share every matrix, a
team, are told the same. That is all that is needed of whoever calls them: what follows from it they decide alike
(`engines.native.lane`). Teams get requests of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from stretto.engines.base import Completion, Request
from stretto.engines.queue import EngineQueue
from stretto.workers.api import LANE
from stretto.workers.engine_call import EngineCall, engine_of_cell
from stretto.workers.scatter_gather import raise_first
from stretto.workers.team_shares import TeamShares

if TYPE_CHECKING:
    from stretto.workers.worker_group import WorkerGroup

EARLIER = 0.9
"""Processes wait for each other for this share of a deadline, so that those that hear nothing have said so when it
passes, and it is the one that hangs of which it is told."""

MEETINGS = itertools.count(1)
"""Numbers of meetings; never the same one twice."""


class LaneCalls:
    """What a group's generate cells are asked."""

    def __init__(self, worker_group: WorkerGroup, names: Sequence[str]) -> None:
        """`names` are those of the cells."""
        self.worker_group, self.names = worker_group, names
        # An engine with a process of its own reaches all devices of its cell by itself, and one worker asks it.
        ours = {cell.name for cell in worker_group.plan.cells if cell.engine == "native"}
        self.wide = [name for name in names if len(worker_group.devices[name]) > 1 and name in ours]

    def queues(self) -> dict[str, EngineQueue]:
        """Cell -> what trajectories ask."""
        return {name: self._queue(name) for name in self.names}

    def _queue(self, cell: str) -> EngineQueue:
        group, seconds = self.worker_group, self.worker_group.patience.generate
        who, asked = group.device[cell], self._together(cell)
        if cell in self.wide:
            who = cell
        else:
            asked = group.worker(who, seconds).generate
        deadline = group.deadline("generate", who, seconds)
        return EngineQueue(engine_of_cell(asked, cell), deadline=deadline, together=len(group.plan.devices) == 1)

    def _together(self, cell: str) -> EngineCall:
        """One call of all devices of a cell; what the first of each team answers."""
        group, seconds = self.worker_group, self.worker_group.patience.generate
        devices = group.devices[cell]
        teams = next(each.row_ranks for each in group.plan.cells if each.name == cell)
        shares, team = TeamShares(teams), len(devices) // teams

        async def generate(new: Sequence[Request], unwanted: Sequence[int], budget: float) -> list[Completion]:
            asked = [part for part in shares.parts(new) for _ in range(team)]
            try:
                calls = (
                    group.worker(device, seconds).generate(part, unwanted, budget)
                    for device, part in zip(devices, asked, strict=True)
                )
                answers = raise_first(await group.in_lockstep(_kind(cell), calls))
            except BaseException:
                shares.clear()  # as do the devices
                raise
            done = [completion for answer in answers[::team] for completion in answer]
            # A request that was taken out and is asked again may be with two teams: what was taken out comes first.
            done.sort(key=lambda completion: completion.stop != "abort")
            shares.done(done)
            return done

        return generate

    async def meet(self, among: Collection[str] | None = None, *, missing: Collection[str] = ()) -> None:
        """The processes of each cell of several devices meet anew, or only of those with a device `among` these; a cell
        of which one is `missing` waits for it. What was under way in them is forgotten."""
        group = self.worker_group
        for cell in self.wide:
            devices = set(group.devices[cell])
            if (among is None or not devices.isdisjoint(among)) and devices.isdisjoint(missing):
                group.meetings.pop(_kind(cell), None)
                name, seconds = f"{_kind(cell)}-{next(MEETINGS)}", EARLIER * group.patience.generate
                # Every layer adds up: cards do so by themselves, as those of a training cell.
                await group.join(_kind(cell), name, group.devices[cell], seconds=seconds, nccl=True)


def _kind(cell: str) -> str:
    """The kind of the group of a cell's processes."""
    return f"{LANE} {cell}"
