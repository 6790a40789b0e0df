"""Strategies as data: each is a function from devices and roles to a plan, and differs in nothing but that plan.

flatten     every role on all devices, one stage after the other
interleave  roles on fractions of the devices; what lies side by side runs at the same time
separate    generation and training on devices of their own; groups stream from one to the other
elastic     every device generates; those that are done turn to finished groups while the others decode the tail
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from stretto.errors import Problem, RecipeError
from stretto.placement.plan import Cell, Plan

MODELS = {
    "actor": ("generate", "train"),
    "critic": ("value", "fit"),
    "reference": ("reference",),
    "reward": ("reward",),
}
"""Model -> the roles it plays. The order is that of fractions."""

ORDER = ("generate", "reward", "reference", "value", "train", "fit")
"""Roles in the order of their stages, which is also the order in which a device serves them."""

PRESETS = {
    "I1": (Fraction(1), Fraction(1), Fraction(1, 2), Fraction(1, 2)),
    "I2": (Fraction(1, 2), Fraction(1, 2), Fraction(1, 2), Fraction(1, 2)),
}
"""I1: actor and critic everywhere, the two frozen models on one half each. I2: {actor, reference} beside
{critic, reward}; this one is ours, the published code has only the first."""


STILL: Mapping[str, object] = {"move": False, "gate": None}
"""Tails stay where they are."""

COURSES: Mapping[str, tuple[Literal["phased", "streamed"], Mapping[str, object]]] = {
    "flatten": ("phased", STILL),
    "interleave": ("phased", STILL),
    "separate": ("streamed", STILL),
    "elastic": ("streamed", {"move": True, "gate": 1.5}),
}
"""Strategy -> how stages follow each other in its plans, and what becomes of tails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyInputs:
    """What plans are made of."""

    devices: tuple[str, ...]
    """Every device, hosts together."""
    roles: frozenset[str]
    """Roles that the step needs."""
    reading: frozenset[str] = frozenset({"generate"})
    """Roles that read the trainer's own tensors where they lie on its device; the others hold weights of their own."""
    width: Mapping[str, int] = field(default_factory=dict)
    """Role -> devices of one of its cells; 1 where not said."""
    degrees: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Role -> how such a cell divides its model; where not said, all of its devices hold a shard (`dp_shard`)."""
    engine: str = "native"
    """What generates."""
    staleness: int = 0
    """Versions the sampler may lag behind."""
    optimizer: Literal["replicated", "sharded"] = "replicated"
    """Or sharded."""


def flatten(layout: StrategyInputs) -> Plan:
    """Every role on all devices, phased."""
    return _plan("flatten", layout, dict.fromkeys(layout.roles, layout.devices))


def interleave(layout: StrategyInputs, fractions: Sequence[Fraction] | str = "I1") -> Plan:
    """Roles on fractions of the devices, phased; cells side by side run at the same time."""
    shares = PRESETS[fractions] if isinstance(fractions, str) else tuple(fractions)
    return _plan("interleave", layout, rows(layout, shares))


def separate(layout: StrategyInputs, generating: int | None = None) -> Plan:
    """The first `generating` devices generate (half of them if not said), the others do everything else."""
    count = len(layout.devices)
    if count < 2:
        raise RecipeError.of("placement.strategy", "separate needs two devices, see 1", "use flatten")
    first = generating or max(1, count // 2)
    if not 0 < first < count:
        reason = f"leaves {count - first} of {count} devices to train"
        raise RecipeError.of("placement.fractions", reason, "leave some devices to each side")
    places = {r: layout.devices[:first] if r == "generate" else layout.devices[first:] for r in layout.roles}
    return _plan("separate", layout, places)


def elastic(layout: StrategyInputs) -> Plan:
    """Every role on all devices, streamed; tails move together when that pays."""
    return _plan("elastic", layout, dict.fromkeys(layout.roles, layout.devices))


STRATEGIES: Mapping[str, Callable[[StrategyInputs], Plan]] = {
    "flatten": flatten,
    "interleave": interleave,
    "separate": separate,
    "elastic": elastic,
}
"""Name -> how its plan is made."""


def rows(layout: StrategyInputs, shares: Sequence[Fraction]) -> dict[str, tuple[str, ...]]:
    """Role -> its devices: models are laid first-fit into rows of sum 1; those in a row lie side by side."""
    if len(shares) != len(MODELS):
        raise _fractions(f"has {len(shares)} numbers", f"give four, for {', '.join(MODELS)}")
    count, filled, places = len(layout.devices), list[Fraction](), dict[str, tuple[str, ...]]()
    for (model, roles), share in zip(MODELS.items(), shares, strict=True):
        if not 0 < share <= 1:
            raise _fractions(f"gives {share} of the devices to the {model}", "use shares above 0, up to 1")
        if (share * count).denominator != 1:
            raise _fractions(f"gives {share} of {count} devices to the {model}", "use shares that fit the devices")
        row = next((index for index, full in enumerate(filled) if full + share <= 1), len(filled))
        if row == len(filled):
            filled.append(Fraction(0))
        first = int(filled[row] * count)
        filled[row] += share
        places |= {r: layout.devices[first : first + int(share * count)] for r in roles if r in layout.roles}
    if any(full != 1 for full in filled):
        raise _fractions(f"{_told(shares)} leaves devices without work", "use shares that add up to whole rows")
    return places


def _told(shares: Sequence[Fraction]) -> str:
    return f"({', '.join(map(str, shares))})"


def _fractions(reason: str, fix: str) -> RecipeError:
    return RecipeError(Problem(field="placement.fractions", reason=reason, fix=fix))


def _plan(strategy: str, layout: StrategyInputs, places: Mapping[str, tuple[str, ...]]) -> Plan:
    """Cells of each role on its devices, and the order in which each device serves them."""
    cells: list[Cell] = []
    for role in sorted(places, key=ORDER.index):
        width, devices = layout.width.get(role, 1), places[role]
        if len(devices) % width:
            reason = f"a {role} cell takes {width} devices, and {len(devices)} are not a multiple of that"
            raise RecipeError.of("placement.cluster", reason, "use a multiple of it")
        groups = [devices[start : start + width] for start in range(0, len(devices), width)]
        cells += [
            Cell(
                name=role if len(groups) == 1 else f"{role}-{index}",
                role=role,
                devices=group,
                mesh={"dp_shard": width, "tp": 1, "pp": 1, "ep": 1, **layout.degrees.get(role, {})},
                engine=layout.engine if role == "generate" else None,
            )
            for index, group in enumerate(groups)
        ]
    trainers, (flow, tail) = WeightSources(cells), COURSES[strategy]
    cells = [trainers.with_weights(cell) if cell.role in layout.reading else cell for cell in cells]
    if flow == "phased":
        cells = [_given_back(cell) for cell in cells]
    return Plan(
        strategy=strategy,
        flow=flow,
        staleness=layout.staleness,
        optimizer=layout.optimizer,
        cells=tuple(cells),
        priority=served(cells, layout.devices),
        tail=tail,
    )


def _given_back(cell: Cell) -> Cell:
    """What was gathered to be read leaves its memory to the training that it was gathered from."""
    return replace(cell, sleeps=("train",)) if cell.weights.startswith("gather:") and cell.role != "value" else cell


class WeightSources:
    """The cells that train, by their devices: whose tensors the others may read."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self.at: dict[tuple[str, str], list[Cell]] = {}
        for cell in cells:
            for device in cell.devices if cell.role in ("train", "fit") else ():
                self.at.setdefault((cell.role, device), []).append(cell)

    def with_weights(self, cell: Cell) -> Cell:
        """Whose weights a cell reads, if it need not hold its own: for values the critic's, else the policy's."""
        update = "fit" if cell.role == "value" else "train"
        for trainer in self.at.get((update, cell.devices[0]), ()) if cell.devices else ():
            if set(cell.devices) <= set(trainer.devices):
                alike = cell.devices == trainer.devices and cell.mesh == trainer.mesh
                same = alike and trainer.mesh.get("dp_shard", 1) == 1
                return replace(cell, weights=f"{'shared' if same else 'gather'}:{trainer.name}")
        return cell


def served(cells: Iterable[Cell], devices: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Device -> names of its cells, in this order."""
    found: dict[str, list[str]] = {device: [] for device in devices}
    for cell in cells:
        for device in dict.fromkeys(cell.devices):
            found[device].append(cell.name)
    return {device: tuple(names) for device, names in found.items()}
