"""One way to do a step: a strategy and the numbers that it leaves open, and the plan that they make.

A choice is small, so that thousands can be compared before a plan is made of any. `strategies` makes the plan; which
roles then lie together, and whose tensors they read, is known here without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

from stretto.placement.baselines import record_of
from stretto.placement.partitions import Partition, RolePlace
from stretto.placement.plan import Cell, Plan, partly_shared
from stretto.placement.strategies import ORDER, Division, Strategy, StrategyInputs
from stretto.planner.problem import ALONE, ModelSplit, PlanningProblem
from stretto.planner.unmade import cut_moments
from stretto.planner.workload import StepWorkload
from stretto.scheduler.records import UPDATE

Source = Literal["own", "shared", "gather"]
"""Where the weights of a role come from: as in `Cell.weights`, without the cell's name."""

FILL = 4
"""Micro-batches per stage of a pipeline that a piece has; with fewer, filling and draining would take much of it."""


class DeviceGroup(NamedTuple):
    """Devices that serve the same roles. A tuple, because much is looked up by it."""

    roles: tuple[str, ...]
    """Which, in the order of their stages."""
    first: int
    """Index of the first device."""
    size: int
    """How many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDevices:
    """Where the roles of a step lie."""

    places: Mapping[str, tuple[int, int]]
    """Role -> (index of its first device, how many)."""
    sides: tuple[DeviceGroup, ...]
    """The devices by what they serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy with its numbers."""

    strategy: str
    """The strategy's name."""
    devices: int
    """How many devices it uses, the first ones."""
    fractions: tuple[Fraction, ...] | Partition | tuple[RolePlace, ...] | None = None
    """The share of each model, or of groups of them, where the strategy gives them some; or where a user lays roles."""
    generating: int | None = None
    """How many devices generate, where these have no other work."""
    lane: ModelSplit = ALONE
    """Cells that generate."""
    train: ModelSplit = ALONE
    """Cells that train, and those that read their tensors for a forward."""
    frozen: ModelSplit = ALONE
    """Cells of models that hold weights of their own."""
    others: tuple[tuple[str, ModelSplit], ...] = ()
    """(role, how its cells are divided) where it is none of the three."""
    recompute: bool = False
    """Whether the backward recomputes activations."""
    budget: int = 16384
    """Most tokens of a micro-batch on one rank."""
    sharded: bool = False
    """Whether copies of what is trained share its optimizer."""
    sleeps: bool = False
    """Whether cells leave their memory to others while those work; where stages flow, only the optimizer does, until
    the update."""
    laid: dict[frozenset[str], RoleDevices] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By roles, as far as it was asked: everything that is priced begins with it."""

    @property
    def label(self) -> str:
        """The strategy, with its fractions."""
        return record_of(self.strategy).label(self.division, self.devices)

    @property
    def division(self) -> Division:
        """The numbers that the strategy leaves open."""
        return self.generating if self.fractions is None else self.fractions

    @property
    def streamed(self) -> bool:
        """Stages flow instead of waiting for each other."""
        return record_of(self.strategy).flow == "streamed"

    @property
    def plain(self) -> bool:
        """False if devices share matrices or experts or form pipelines: these talk in every layer."""
        return all(split.width == split.dp for split in self._splits)

    @property
    def whole(self) -> bool:
        """True if every device has all of each model that it has."""
        return all(split.width == 1 for split in self._splits)

    @property
    def _splits(self) -> tuple[ModelSplit, ...]:
        return (self.lane, self.train, self.frozen, *(split for _, split in self.others))

    def whitens(self, workload: StepWorkload) -> bool:
        """Whether gradients are whitened at the end of a step: groups then stream though credit needs all of them."""
        moved = workload.several or workload.staleness > 0
        return workload.whitens and self.streamed and self.train.width == 1 and not moved

    def waits(self, workload: StepWorkload) -> bool:
        """Whether training waits for every group."""
        return workload.barrier and not self.whitens(workload)

    def split(self, role: str, reading: frozenset[str]) -> ModelSplit:
        """How a cell of a role is divided."""
        if self.others and (own := dict(self.others).get(role)):
            return own
        if role == "generate":
            return self.lane
        return self.train if role in ("train", "fit") or role in reading else self.frozen

    def places(self, roles: frozenset[str]) -> Mapping[str, tuple[int, int]]:
        """Role -> (index of its first device, how many)."""
        return self._lay(roles).places

    def sides(self, roles: frozenset[str]) -> tuple[DeviceGroup, ...]:
        """The devices by what they serve."""
        return self._lay(roles).sides

    def _lay(self, roles: frozenset[str]) -> RoleDevices:
        if roles not in self.laid:
            self.laid[roles] = _lay(self.devices, record_of(self.strategy), self.division, roles)
        return self.laid[roles]

    def lanes(self, roles: frozenset[str]) -> int:
        """Cells that generate."""
        _, count = self.places(roles)["generate"]
        return max(1, count // self.lane.width)

    def source(self, role: str, workload: StepWorkload) -> Source:
        """Where a role's weights come from: the trainer's tensors where each of its cells lies within one of those. An
        engine with a process of its own has its own."""
        update = "fit" if role == "value" else "train"
        if role not in workload.reading or (role == "generate" and workload.engine_apart):
            return "own"
        places = self.places(workload.roles)
        (first, count), (start, many) = places[role], places[update]
        mine, theirs = self.split(role, workload.reading), self.split(update, workload.reading)
        width, wide = mine.width, theirs.width
        within = start <= first and first + count <= start + many
        if not within or wide % width or (first - start) % width:
            return "own"
        alike = mine == theirs and (first - start) % wide == 0
        shards = role == "generate" and mine.ep == 1  # which are gathered at every token
        return "shared" if alike and (theirs.dp == 1 or shards) else "gather"

    def waits_for(self, workload: StepWorkload) -> Iterator[str]:
        """What of it nothing can execute yet."""
        splits = {role: self.split(role, workload.reading) for role in workload.roles}
        fitted = [role for role in ("train", "fit") if role in splits]
        others = workload.roles - workload.reading - {*UPDATE, "generate"}
        frozen = [splits[role] for role in others if not self._like_policy(role, workload)]
        told = (
            *self._unmade_lane(workload),
            *self._uncut(workload),
            ("fit" in splits and splits["fit"].width > splits["fit"].dp, "critics that are cut in more than slices"),
            (any(split.width > split.dp for split in frozen), "frozen models that are cut in more than slices"),
            (self._values_apart(workload), "values of a critic in slices where it is not trained"),
            (workload.exact and self.train.width > 1, "the exact KL of a model in slices"),
            *((self._cuts_moments(role, splits[role], workload), "adamw8bit on parts of a block") for role in fitted),
            (workload.served and self.devices > 1, "a server of your own beside several devices"),
        )
        yield from dict.fromkeys((*(what for asked, what in told if asked), *workload.unmade))

    def _cuts_moments(self, role: str, split: ModelSplit, workload: StepWorkload) -> bool:
        """True if devices that share matrices would share a block of moments of 8 bits."""
        optimizer, rank = workload.optimizer_of(role), workload.adapter_of(role)
        return cut_moments(workload.shapes[role], split.degrees, optimizer=optimizer, rank=rank, field="") is not None

    def _unmade_lane(self, workload: StepWorkload) -> Iterator[tuple[bool, str]]:
        """What of a cell that generates cannot be done by several devices, and whether it would be."""
        lane = self.lane
        if lane.width > 1 and workload.engine != "native":
            yield workload.engine != "vllm", f"{workload.engine} on several devices together"
            yield lane.tp < lane.width, "vLLM on devices that do not share every matrix"
            others = any("generate" in side.roles and len(side.roles) > 1 for side in self.sides(workload.roles))
            yield self.sleeps and others, "vLLM on several devices that it shares with what sleeps"
        yield lane.pp > 1, "pipelines that generate"
        yield partly_shared(lane.degrees), "lanes that share neither all matrices nor all experts"
        yield from _unshared(lane, workload, "generate")

    def _values_apart(self, workload: StepWorkload) -> bool:
        """True if a critic that is trained is asked in slices, or beside some, on other cells than those that train it:
        there a device has a copy of all of it."""
        if not {"fit", "value"} <= workload.roles:
            return False
        (first, count), (start, many) = (self.places(workload.roles)[role] for role in ("value", "fit"))
        asked, trained = (self.split(role, workload.reading) for role in ("value", "fit"))
        beside = first < start + many and start < first + count
        return (first, count, asked) != (start, many, trained) and (asked.width > 1 or (beside and trained.width > 1))

    def _uncut(self, workload: StepWorkload) -> Iterator[tuple[bool, str]]:
        """What of a cell that trains cannot be cut, and whether it would be."""
        yield self.train.pp > 1, "pipelines that train"
        yield from _unshared(self.train, workload, "train")
        spread = self.train.ep > 1 and self.train.ep % self.train.tp > 0
        yield spread, "experts spread over fewer devices than share a matrix"

    def _like_policy(self, role: str, workload: StepWorkload) -> bool:
        """True for a reference that is cut like the policy on the devices where that is trained."""
        places = self.places(workload.roles)
        referred = role == "reference" and not workload.taught  # a teacher is another model
        return referred and self.split(role, workload.reading) == self.train and places[role] == places["train"]

    def copied(self, roles: frozenset[str]) -> bool:
        """True if several cells train and each has everything, so that one may die while gradients are added up: each
        keeps its own beside the sum."""
        _, training = self.places(roles)["train"]
        return training > self.train.width == 1 and not self.sharded

    def runs(self, workload: StepWorkload) -> bool:
        """True if all of it can be executed."""
        return not any(True for _ in self.waits_for(workload))

    def piece(self, split: ModelSplit) -> int:
        """Most tokens of a piece: a micro-batch for each rank, and enough of them to fill a pipeline."""
        return self.budget * split.mesh.dp * (FILL * split.pp if split.pp > 1 else 1)

    def plan(self, setting: PlanningProblem, *, share: float | None = None) -> Plan:
        """The plan; `share` is what caches may take of a device's memory, where that follows from it."""
        workload = setting.workload
        splits = {role: self.split(role, workload.reading) for role in workload.roles}
        layout = StrategyInputs(
            devices=setting.names[: self.devices],
            roles=workload.roles,
            reading=workload.reading,
            width={role: split.width for role, split in splits.items()},
            degrees={role: split.degrees for role, split in splits.items()},
            engine=workload.engine,
            staleness=workload.staleness,
            optimizer="sharded" if self.sharded else "replicated",
        )
        plan = record_of(self.strategy).plan(layout, self.division)
        on = plan.roles_on
        cells = (
            replace(
                cell,
                sleeps=self._sleeps(cell, on) if self.sleeps else cell.sleeps,
                token_budget=None if cell.role == "generate" else self.budget,
                recompute=self.recompute and cell.role in UPDATE and len(cell.devices) > 1,
                memory_share=share if cell.role == "generate" else None,
            )
            for cell in plan.cells
        )
        return replace(plan, cells=tuple(cells))

    def _sleeps(self, cell: Cell, on: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
        """Phases in which a cell leaves its memory to others."""
        if not self.streamed:
            return _others(cell, on)
        return ("generate",) if cell.role in UPDATE else ()


def _unshared(split: ModelSplit, workload: StepWorkload, role: str) -> Iterator[tuple[bool, str]]:
    """What of a role's model devices cannot share, and whether they would."""
    shape = workload.shapes.get(role)
    if shape is not None:
        yield shape.uncut and max(split.tp, split.ep) > 1, "a family that was not tried cut"
        dealt = shape.kv_heads % split.tp == 0 or split.tp % shape.kv_heads == 0
        yield not dealt, "key-value heads that devices cannot share evenly"


def _others(cell: Cell, on: Mapping[str, frozenset[str]]) -> tuple[str, ...]:
    """Roles that some device of a cell serves besides; `on` has those of each device."""
    beside = {role for device in cell.devices for role in on[device]} - {cell.role}
    return tuple(sorted(beside, key=ORDER.index))


@lru_cache(maxsize=4096)
def _lay(devices: int, strategy: Strategy, division: Division, roles: frozenset[str]) -> RoleDevices:
    """What the strategy makes of so many devices, by their indices."""
    laid = strategy.places(range(devices), roles, division)
    places = {role: (there[0], len(there)) for role, there in laid.items()}
    return RoleDevices(places=places, sides=tuple(_each_side(places)))


def _each_side(places: Mapping[str, tuple[int, int]]) -> Iterator[DeviceGroup]:
    edges = sorted({edge for first, count in places.values() for edge in (first, first + count)})
    for low, high in pairwise(edges):
        roles = [role for role, (first, count) in places.items() if first <= low and high <= first + count]
        if roles:
            yield DeviceGroup(roles=tuple(sorted(roles, key=ORDER.index)), first=low, size=high - low)
