"""Seconds of what follows when everything is accumulated, and between stages: updates, new weights, changes of stage.

Each is priced by what the plan does. Cells that share tensors hand nothing over, and a change of stage is a call to
processes. What sleeps moves by the link to host memory, an engine of its own wakes as its makers published, and what
passes between devices is priced by its path (`placement.transport`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.placement.devices import DeviceKind
from stretto.placement.transport import TensorPath, path_between
from stretto.planner.candidate import Candidate, DeviceGroup
from stretto.planner.cost import memory, transfers
from stretto.planner.problem import PlanningProblem
from stretto.scheduler.records import UPDATE, role_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """What follows when everything is accumulated, in seconds."""

    update: float
    """Reduction over the copies, and the optimizer."""
    publish: float
    """New weights into the engines."""
    switch: float
    """Changes between generating and training, what sleeps moving out and in."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.update + self.publish + self.switch


class StepEnds:
    """Ends of steps by choice; what choices have in common is counted once."""

    def __init__(self, setting: PlanningProblem) -> None:
        self.setting, self.costs = setting, setting.costs
        self.known: dict[object, float] = {}
        self.paths: dict[tuple[int, int], TensorPath] = {}

    def ending(self, choice: Candidate) -> StepEnd:
        """What follows when everything is accumulated."""
        work, moves = self.setting.workload, 0.0
        sides = choice.sides(work.roles)
        for side in sides if choice.sleeps else ():
            if len(side.roles) > 1:
                moves = max(moves, math.fsum(self._asleep(choice, side, role) for role in side.roles))
        switch = self._turns(sides) + moves + self._wakes(choice, sides)
        return StepEnd(update=work.parts * self._updates(choice, sides), publish=self._publish(choice), switch=switch)

    def _wakes(self, choice: Candidate, sides: tuple[DeviceGroup, ...]) -> float:
        """An engine of its own that gives its memory back while others work, besides what of it moves."""
        beside = any("generate" in side.roles and len(side.roles) > 1 for side in sides)
        sleeps = choice.sleeps and not choice.streamed
        return self.costs.rates.wake if self.setting.workload.engine_apart and beside and sleeps else 0.0

    def _turns(self, sides: tuple[DeviceGroup, ...]) -> float:
        """Changes from one stage to the next, on the side that has most of them."""
        key = ("turns", sides)
        if key not in self.known:
            old = "old" in self.setting.workload.stages
            counts = [len(side.roles) + (old and role_of("old") in side.roles) for side in sides]
            turns = (count * self.costs.turn(side.size) for side, count in zip(sides, counts, strict=True))
            self.known[key] = max(turns)
        return self.known[key]

    def _updates(self, choice: Candidate, sides: tuple[DeviceGroup, ...]) -> float:
        """Seconds of the updates of all that a group of devices trains, on the slowest group."""
        key = ("updates", choice.train, choice.others, sides)
        if key not in self.known:
            trained = ([role for role in side.roles if role in UPDATE] for side in sides)
            places = choice.places(self.setting.workload.roles)
            each = (math.fsum(self.update(choice, places[role], role) for role in roles) for roles in trained)
            self.known[key] = max(0.0, *each)
        return self.known[key]

    def update(self, choice: Candidate, place: tuple[int, int], role: str) -> float:
        """One update of what a role trains on the devices of a place."""
        work, (first, count) = self.setting.workload, place
        split = choice.split(role, work.reading)
        site = self.setting.site(split, first, count)
        cells, path = max(1, count // split.width), self.gradient_path(choice, role)
        adapter, wire = work.adapter_of(role), 2.0 if work.rounds_sums else 4.0
        return self.costs.update(work.shapes[role], site, adapter=adapter, cells=cells, path=path, wire=wire)

    def gradient_path(self, choice: Candidate, role: str = "train") -> TensorPath:
        """How the devices that train a role add up their gradients."""
        first, count = choice.places(self.setting.workload.roles)[role]
        width = choice.split(role, self.setting.workload.reading).width
        return self._inside(first, count) if count == width else self._path(first, first + count)

    def weight_path(self, choice: Candidate) -> TensorPath:
        """How new weights get to those that generate."""
        work = self.setting.workload
        source, places = choice.source("generate", work), choice.places(work.roles)
        if source != "own":
            return TensorPath.SHARED if source == "shared" else self._inside(*places["train"])
        trained, served = _span(places["train"]), _span(places["generate"])
        if work.engine_apart and trained.start <= served.start and served.stop <= trained.stop:
            return TensorPath.FILE
        return self._path(min(trained.start, served.start), max(trained.stop, served.stop))

    def _inside(self, first: int, count: int) -> TensorPath:
        """Between the devices of one cell, which meet in a group of torch's own (`training.parallel.fsdp`)."""
        if count == 1:
            return TensorPath.SHARED
        gpu = self.setting.weakest(first, count).kind is DeviceKind.GPU
        return TensorPath.NCCL if gpu else TensorPath.GLOO

    def _path(self, start: int, stop: int) -> TensorPath:
        """Between these devices."""
        if (start, stop) not in self.paths:
            names = self.setting.names[start:stop]
            self.paths[start, stop] = path_between(names, nccl=self.setting.workload.nccl)
        return self.paths[start, stop]

    def _asleep(self, choice: Candidate, side: DeviceGroup, role: str) -> float:
        """Moving what a role holds to host memory and back, in a step.

        Of what is frozen the host has a copy, so that it only comes back. What is trained goes both ways, its weights
        only if somebody on the device does not read them, and so do those of an engine of its own. Where stages flow,
        only optimizers sleep.
        """
        work = self.setting.workload
        if role not in UPDATE and (choice.streamed or choice.source(role, work) != "own"):
            return 0.0
        split = choice.split(role, work.reading)
        key = ("asleep", role, split, side, choice.streamed)
        if key not in self.known:
            shape, site = work.shapes[role], self.setting.site(split, side.first, side.size)
            if role in UPDATE:
                adapter, optimizer = work.adapter_of(role), work.optimizer_of(role)
                held = memory.states(shape, site, adapter=adapter, base=work.precision_of(role), optimizer=optimizer)
                needed = choice.streamed or all(other == role or other in work.reading for other in side.roles)
                size = 2 * (held.optimizer + (0.0 if needed else held.weights))
            else:
                ways = 2 if role == "generate" and work.engine_apart else 1
                size = ways * memory.weights(shape, site, work.precision_of(role))
            self.known[key] = self.costs.move(size, site)
        return self.known[key]

    def _publish(self, choice: Candidate) -> float:
        work, source = self.setting.workload, choice.source("generate", self.setting.workload)
        path = self.weight_path(choice)
        if source == "shared":
            return 0.0
        places = choice.places(work.roles)
        key = ("publish", source, choice.lane, choice.train, places["generate"], places["train"])
        if key not in self.known:
            self.known[key] = self._handed_over(choice, source == "own", path)
        return self.known[key]

    def _handed_over(self, choice: Candidate, elsewhere: bool, path: TensorPath) -> float:
        """New weights to engines on other devices, or from what a device trains to what its engine reads."""
        setting, work = self.setting, self.setting.workload
        shape, places = work.shapes["generate"], choice.places(work.roles)
        trainer, engine = setting.site(choice.train, *places["train"]), setting.site(choice.lane, *places["generate"])
        if not elsewhere:
            return transfers.reshard(self.costs, shape, trainer, engine)
        served = {index for role in ("train", "generate") for index in _span(places[role])}
        hosts, device = {setting.hosts[index] for index in served}, engine.device
        count = places["generate"][1] + (places["train"][1] - 1 if path is TensorPath.GLOO else 0)
        return transfers.hand_over(
            self.costs,
            transfers.own_route(path, engine_apart=work.engine_apart),
            shape,
            trainer,
            engine,
            receivers=count,
            crosses=len(hosts) > 1 and (device.domain <= device.per_host or len(served) > device.domain),
            adapter=work.adapter,
            precision=work.precision_of("generate"),
        ).seconds


def _span(place: tuple[int, int]) -> range:
    """Indices of the devices of a place."""
    first, count = place
    return range(first, first + count)
