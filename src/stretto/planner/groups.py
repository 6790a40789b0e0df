"""Models in groups that lie side by side: which groups, how many devices each has, and layouts that are worth a look.

Four models can be put into groups in 15 ways, and a cluster can be cut between them at many places; each model of a
group may then be divided in its own way. Groups work at the same time and stages wait for each other, so what is best
for a model on its devices hardly depends on the others: of every model a few layouts are kept (no other is both faster
and smaller), closed forms of the fastest rank the cuts, and only of the best cuts all combinations are tried. The
search by partitions is that of HybridFlow (Sheng et al. 2024, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import NamedTuple

from stretto.placement.baselines import record_of
from stretto.placement.partitions import ModelGroup
from stretto.placement.strategies import DEFAULT
from stretto.planner.candidate import Candidate, DeviceGroup
from stretto.planner.cost import memory
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.estimate import estimate
from stretto.planner.problem import ModelSplit
from stretto.planner.splits import Splits
from stretto.scheduler.records import UPDATE

ALL = 16
"""Of so many devices every number may make a group; of more whole hosts, sixteenths, and a few devices at the ends."""
ENDS = (1, 2, 4)
"""Devices of a group beside which all others are one: what a small model needs."""
CUTS = 6
"""Groups with sizes whose layouts are combined."""
KEPT = {"generate": 4, "train": 3, "fit": 3, "value": 2, "reference": 2, "reward": 2}
"""Layouts that are kept of each role, from the fastest to the smallest."""


class Layout(NamedTuple):
    """One way to divide a model on its devices."""

    seconds: float
    """Of its own stages and updates."""
    size: float
    """Bytes that it holds on a device while it does nothing."""
    split: ModelSplit
    """Itself."""


class GroupedCandidates:
    """Layouts of groups of models; what groups have in common is counted once."""

    def __init__(self, prices: StageTimes, rooms: MemoryFits, splits: Splits, least: int) -> None:
        self.least = least
        self.setting, self.prices, self.rooms, self.splits = prices.setting, prices, rooms, splits
        work = self.setting.workload
        critic = {"fit"} if "fit" in work.roles else {"value"}
        self.divided = [role for role in KEPT if role in work.roles and role not in {"fit", "value"} - critic]
        self.known: dict[tuple[str, int, int, int], tuple[Layout, ...]] = {}

    def choices(self, base: Candidate) -> Iterator[Candidate]:
        """The most promising layouts on the devices of `base`."""
        found = sorted(self.cuts(base), key=lambda item: item[0])
        for _, choice, fronts in found[:CUTS]:
            for layouts in product(*fronts.values()):
                yield self._with(choice, dict(zip(fronts, layouts, strict=True)))

    def cuts(self, base: Candidate) -> Iterator[tuple[float, Candidate, dict[str, tuple[Layout, ...]]]]:
        """Every way to cut the devices that may fit: the fastest layouts, their seconds if memory were no matter, and
        all layouts that are kept."""
        strategy, roles, size = record_of(base.strategy), self.setting.workload.roles, base.devices
        presets = [replace(base, fractions=shares) for shares in strategy.presets.values() if not size % 2]
        presets = [choice for choice in presets if strategy.cannot(roles, choice.division) is None]
        called = [(choice.places(roles), choice) for choice in presets]
        places = self._places(size)
        for groups in strategy.groups(roles):
            for cut in combinations(places, len(groups) - 1):
                sizes = [stop - start for start, stop in pairwise((0, *cut, size))]
                shares = (ModelGroup(models, Fraction(n, size)) for models, n in zip(groups, sizes, strict=True))
                choice = replace(base, fractions=tuple(shares))
                there = choice.places(roles)
                choice = next((preset for place, preset in called if place == there), choice)
                fronts = {role: self._front(role, *there[role], base.budget) for role in self._own(there)}
                if all(fronts.values()) and self._has_room(there, fronts):
                    fastest = self._with(choice, {role: front[0] for role, front in fronts.items()})
                    yield estimate(self.prices, fastest), fastest, fronts

    def _places(self, size: int) -> list[int]:
        """Where so many devices may be cut."""
        if size <= ALL:
            return list(range(1, size))
        host = self.setting.together(0, size)
        step = host * -(-size // (host * ALL))
        places = {round(size * part / ALL) for part in range(1, ALL)} | set(range(step, size, step))
        places |= {end for few in ENDS for end in (few, size - few)}
        return sorted(place for place in places if 0 < place < size)

    def _own(self, places: Mapping[str, tuple[int, int]]) -> list[str]:
        """Roles that are divided in their own way; a reference that reads what is trained beside it is not."""
        reading = self.setting.workload.reading
        beside = [role for role in ("reference",) if role in reading and places[role] == places["train"]]
        return [role for role in self.divided if role not in beside]

    def _has_room(self, places: Mapping[str, tuple[int, int]], fronts: Mapping[str, tuple[Layout, ...]]) -> bool:
        """True if the smallest layouts of models on the same devices have room beside each other."""
        held: dict[tuple[int, int], float] = {}
        for role, front in fronts.items():
            if role != "generate":
                held[places[role]] = held.get(places[role], 0.0) + front[-1].size
        return all(size <= self._room(*place) for place, size in held.items())

    def _room(self, first: int, count: int) -> float:
        device = self.setting.weakest(first, count)
        return memory.USABLE * device.memory - memory.context_of(device)

    def _with(self, choice: Candidate, layouts: Mapping[str, Layout]) -> Candidate:
        """A choice with these layouts; values are computed on the cells that train the critic, if any do."""
        others = {role: layout.split for role, layout in layouts.items() if role not in ("generate", "train")}
        if "fit" in others:
            others["value"] = others["fit"]
        lane, train = layouts["generate"].split, layouts["train"].split
        return replace(choice, lane=lane, train=train, others=tuple(others.items()))

    def _front(self, role: str, first: int, count: int, budget: int) -> tuple[Layout, ...]:
        """Layouts of a role, each smaller than all that are faster; the smallest is always among them."""
        key = (role, first, count, budget)
        if key not in self.known:
            front = list[Layout]()
            for layout in sorted(self._layouts(role, first, count, budget)):
                # How fast a lane is, closed forms know least: all are kept that may be fast.
                if not front or role == "generate" or layout.size < front[-1].size:
                    front.append(layout)
            most = KEPT[role]
            self.known[key] = tuple(front if len(front) <= most else [*front[: most - 1], front[-1]])
        return self.known[key]

    def _layouts(self, role: str, first: int, count: int, budget: int) -> Iterator[Layout]:
        """Every way to divide a role on these devices, alone on them."""
        work, host = self.setting.workload, self.setting.together(first, count)
        usual = Candidate(strategy=DEFAULT, devices=count, budget=budget)
        side, place = DeviceGroup(roles=(role,), first=first, size=count), (first, count)
        for split in self._splits(role, count, host):
            choice = replace(usual, lane=split) if role == "generate" else replace(usual, others=((role, split),))
            if role == "generate":
                seconds = self.prices.generate(choice, math.inf)
            elif role in UPDATE:
                forward = ["value"] if role == "fit" else []
                valued = replace(choice, others=((role, split), ("value", split)))
                seconds = sum(self.prices.stage(valued, place, stage) for stage in (*forward, role))
                seconds += work.parts * self.prices.ends.update(choice, place, role)
            else:
                seconds = self.prices.stage(choice, place, role)
            small = replace(choice, recompute=work.recompute is not False, sharded=not work.adapter, budget=self.least)
            held, needed = self.rooms.alone(small, side, role)
            if held + needed <= self._room(first, count):
                yield Layout(seconds, held, split)

    def _splits(self, role: str, count: int, host: int) -> list[ModelSplit]:
        if role == "generate":
            return self.splits.lanes(count, host)
        return self.splits.trains(count, host, role) if role in UPDATE else self.splits.frozen(count, host)
