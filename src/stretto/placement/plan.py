"""A plan: which cells exist on which devices, in which order a device serves them, and how stages follow each other.

A plan is a value. It can be printed, written as JSON, read back and edited by hand; whatever executes a step
interprets it and knows no strategy by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One copy of one role in one parallel layout on some devices."""

    name: str
    """Name in timelines."""
    role: str
    """generate, reference, reward, value, train or fit."""
    devices: tuple[str, ...]
    """Such as "localhost/cpu:0"."""
    mesh: Mapping[str, int] = field(default_factory=lambda: {"dp_shard": 1, "tp": 1, "pp": 1, "ep": 1})
    """Degrees of parallelism inside the cell."""
    engine: str | None = None
    """What generates, in a cell that does."""
    weights: str = "own"
    """own, shared:<cell> or gather:<cell>."""
    sleeps: tuple[str, ...] = ()
    """Phases in which it leaves its memory to others; what that means for each role is in `workers.offload`."""
    token_budget: int | None = None
    """Most tokens in a micro-batch; none if measured at run time."""
    recompute: bool = False
    """Whether its backward recomputes activations from the first row on. A cell of one device begins by itself when
    memory runs out, and needs not be told."""
    memory_share: float | None = None
    """Share of a device's memory that caches may take, in a cell that generates; none if the engine decides."""

    @property
    def row_ranks(self) -> int:
        """Devices, or groups of them, that compute rows of their own: those that share matrices compute the same."""
        return len(self.devices) // (self.mesh.get("tp", 1) * self.mesh.get("pp", 1))


def partly_shared(mesh: Mapping[str, int]) -> bool:
    """Whether devices share neither every matrix nor all experts, so that they cannot generate together."""
    devices = mesh["dp_shard"] * mesh["tp"] * mesh["pp"]
    return mesh["ep"] != devices and (mesh["dp_shard"] > 1 or mesh["ep"] > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where everything lives."""

    strategy: str
    """The name it came from; nothing that executes it looks here."""
    flow: Literal["phased", "streamed"]
    """Barriers between stages, or none."""
    staleness: int
    """Versions the sampler may lag behind."""
    optimizer: Literal["replicated", "sharded"]
    """Whether every training cell holds all of the optimizer, or a part of it."""
    cells: tuple[Cell, ...]
    """Every cell."""
    priority: Mapping[str, tuple[str, ...]]
    """Device -> the cells it serves, first served first."""
    tail: Mapping[str, Any] = field(default_factory=lambda: {"move": False, "gate": None})
    """When unfinished sequences move onto fewer cells."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device of its cells, in their order."""
        return tuple(dict.fromkeys(device for cell in self.cells for device in cell.devices))

    @property
    def roles_on(self) -> dict[str, frozenset[str]]:
        """Device -> roles of the cells on it."""
        found: dict[str, set[str]] = {}
        for cell in self.cells:
            for device in cell.devices:
                found.setdefault(device, set()).add(cell.role)
        return {device: frozenset(roles) for device, roles in found.items()}

    @property
    def holders(self) -> tuple[str, ...]:
        """Devices that hold the policy: those that train, then those that only generate."""
        train = [device for cell in self.cells if cell.role == "train" for device in cell.devices]
        generate = [device for cell in self.cells if cell.role == "generate" for device in cell.devices]
        return tuple(dict.fromkeys([*train, *generate]))

    def sharers(self, role: str) -> tuple[str, ...]:
        """Devices that train in a role and hold a part of one optimizer each, in the order of their parts; none if it
        is not shared. Those that have the same slice of the model share its optimizer."""
        if self.optimizer != "sharded":
            return ()
        slices = zip(*(cell.devices for cell in self.cells if cell.role == role), strict=True)
        return tuple(device for devices in slices for device in devices)

    def sleeps_on(self, device: str) -> dict[str, tuple[str, ...]]:
        """Role -> phases in which its cell on a device leaves the memory there to others."""
        return {cell.role: cell.sleeps for cell in self.cells if device in cell.devices}

    def in_slices(self, cell: Cell) -> bool:
        """Whether a model is cut over the devices of a cell, which work on it together: one that is trained there, for
        training and for values, and a frozen one of the cell's own. Of a critic that others train each device of a cell
        has a whole copy."""
        if len(cell.devices) < 2 or cell.role == "generate":
            return False
        fitted = [set(each.devices) for each in self.cells if each.role == "fit"]
        if cell.role == "value" and fitted:
            return set(cell.devices) in fitted
        return cell.role in ("train", "fit") or cell.weights == "own"

    def memory_share_on(self, device: str) -> float | None:
        """Share of a device's memory for caches, where it says one."""
        shares = [cell.memory_share for cell in self.cells if cell.role == "generate" and device in cell.devices]
        return next((share for share in shares if share is not None), None)

    def generates_together(self, device: str) -> bool:
        """Whether a device generates in a cell of several."""
        return any(cell.role == "generate" and device in cell.devices and len(cell.devices) > 1 for cell in self.cells)

    def recomputes_on(self, device: str) -> frozenset[str]:
        """Roles that train on a device and recompute activations from the first row on."""
        return frozenset(cell.role for cell in self.cells if device in cell.devices and cell.recompute)

    def only(self, roles: Collection[str]) -> Plan:
        """The cells of these roles alone, for work that needs no others; those whose weights they read may be gone."""
        cells = tuple(
            replace(cell, weights="own", sleeps=tuple(phase for phase in cell.sleeps if phase in roles))
            for cell in self.cells
            if cell.role in roles
        )
        left = {cell.name for cell in cells}
        priority = {device: tuple(n for n in names if n in left) for device, names in self.priority.items()}
        return replace(self, cells=cells, priority={device: names for device, names in priority.items() if names})

    def to_json(self) -> dict[str, Any]:
        """The plan, as plan.json holds it."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceMeeting:
    """Processes that meet before models are cut over them: those of a cell, or of several that share devices."""

    devices: tuple[str, ...]
    """All of them, in an order that is also that of each cell."""
    cells: tuple[tuple[str, ...], ...]
    """The devices of each cell, those of equal ones once."""


def meetings(cells: Iterable[Cell]) -> tuple[SliceMeeting, ...]:
    """Who meets so that these cells may have slices. ValueError if two of them name the same devices in two orders."""
    groups: list[dict[tuple[str, ...], None]] = []
    for devices in dict.fromkeys(cell.devices for cell in cells):
        touched = [group for group in groups if any(set(devices) & set(each) for each in group)]
        groups = [group for group in groups if group not in touched]
        groups.append({each: None for group in touched for each in group} | {devices: None})
    return tuple(SliceMeeting(devices=_ordered(group), cells=tuple(group)) for group in groups)


def _ordered(cells: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    sorter = TopologicalSorter[str]()
    for devices in cells:
        for one, next_one in pairwise(devices):
            sorter.add(next_one, one)
    try:
        return tuple(sorter.static_order())
    except CycleError as error:
        raise ValueError(f"{' and '.join(sorted(set(error.args[1])))} are named in two orders") from error
