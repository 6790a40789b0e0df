"""Strategies as data: each is one entry of `STRATEGIES`. Who needs to know something of a strategy asks its record.

flatten     every role on all devices, one stage after the other
interleave  roles on fractions of the devices; what lies side by side runs at the same time
separate    generation and training on devices of their own; groups stream from one to the other
elastic     every device generates; those that are done turn to finished groups while the others decode the tail
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, cast

from stretto.errors import Problem, RecipeError
from stretto.placement import closed_forms
from stretto.placement.closed_forms import Stages, StepFlow
from stretto.placement.partitions import Partition, RolePlace, is_partition, lay_groups, set_partitions
from stretto.placement.plan import Cell, Plan
from stretto.plugins import is_plugin

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
    """Role -> devices of one of its cells; where not said 1, or as many as train the critic that it asks."""
    degrees: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Role -> how such a cell divides its model; where not said, all of its devices hold a shard (`dp_shard`)."""
    engine: str = "native"
    """What generates."""
    staleness: int = 0
    """Versions the sampler may lag behind."""
    optimizer: Literal["replicated", "sharded"] = "replicated"
    """Or sharded."""


Division = Sequence[Fraction] | Partition | tuple[RolePlace, ...] | int | None
"""What a strategy leaves open: the share of each model, groups of models with their shares, where each role is, or how
many devices generate; none for its usual choice."""

Places = Mapping[str, Sequence[Any]]
"""Role -> its devices, in the order in which they were given."""

STILL: Mapping[str, object] = {"move": False, "gate": None}
"""Tails stay where they are."""

DEFAULT = "flatten"
"""The strategy where none is named: it is never wrong, and needs no measurements."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """How stages share devices. Nothing else in the project knows a strategy by its name."""

    name: str
    """The strategy's name in recipes."""
    sentence: str
    """What a step is, with {asking} where frozen models are asked."""
    flow: Literal["phased", "streamed"]
    """Whether stages wait for each other."""
    tail: Mapping[str, object] = field(default_factory=lambda: STILL)
    """What becomes of tails, as `Plan.tail`."""
    places: Callable[[Sequence[Any], frozenset[str], Division], Places]
    """Where each of these roles lies on these devices; a RecipeError where that cannot be."""
    presets: Mapping[str, tuple[Fraction, ...]] = field(default_factory=dict)
    """Where models have shares of the devices: shares by name, the usual ones first. Others cannot be given any."""
    groups: Callable[[frozenset[str]], Sequence[tuple[tuple[str, ...], ...]]] = lambda roles: ()
    """Ways to put the models of a step into groups that lie side by side, where how large each is may be chosen."""
    gathers: bool = False
    """True if everything is sharded over all devices, and what generates gathers parameters at every token."""
    generates_apart: bool = False
    """True if generation has devices of its own, and how many is open."""
    least_devices: int = 2
    """On fewer it would be another strategy."""
    cannot: Callable[[frozenset[str], Division], str | None] = lambda roles, division: None
    """Why it is out of the question for a step of these roles, or none."""
    seconds: Callable[[Stages, StepFlow], float]
    """The closed form of a step's seconds."""

    def plan(self, layout: StrategyInputs, division: Division = None) -> Plan:
        """The plan that it makes of the devices."""
        return _plan(self, layout, self.places(layout.devices, layout.roles, division))

    def label(self, division: Division = None, devices: int | None = None) -> str:
        """The strategy's name, with the shares where models have some; of groups so many of all devices, if told."""
        if not self.presets or not isinstance(division, Sequence):
            return self.name
        preset = next((name for name, shares in self.presets.items() if shares == tuple(division)), None)
        return f"{self.name} {preset or _told(tuple(division), devices)}"

    def refusal(self, *, devices: int, roles: frozenset[str], staleness: int, division: Division = None) -> str | None:
        """Why it is out of the question for a step like this, or none."""
        if staleness and not self.generates_apart:
            return f"staleness {staleness} needs devices that only generate"
        if devices < self.least_devices:
            return "it needs two devices, and there is one"
        return self.cannot(roles, division)


def find_strategy(name: str) -> Strategy:
    """The strategy of this name, `auto` being the default; or a RecipeError with the nearest name that is known."""
    if name == "auto" or name in STRATEGIES:
        return STRATEGIES[DEFAULT if name == "auto" else name]
    near = difflib.get_close_matches(name, ["auto", *STRATEGIES], n=1)
    fix = f"did you mean {near[0]}?" if near else f"use one of auto, {', '.join(STRATEGIES)}"
    raise RecipeError.of("placement.strategy", f"there is no strategy {name!r}", fix)


def _everywhere(devices: Sequence[Any], roles: frozenset[str], division: Division) -> Places:
    return dict.fromkeys(roles, devices)


def _side_by_side(devices: Sequence[Any], roles: frozenset[str], division: Division) -> Places:
    if is_partition(division):
        return lay_groups(devices, roles, division, MODELS)
    return rows(devices, roles, cast(Sequence[Fraction], division or PRESETS["I1"]))


def _apart(devices: Sequence[Any], roles: frozenset[str], division: Division) -> Places:
    """The first devices generate (half of them if not said), the others do everything else."""
    count = len(devices)
    if count < 2:
        fix = f"use {DEFAULT}, or name two or more in placement.cluster, such as 2xcpu or 8xH100"
        raise RecipeError.of("placement.strategy", "separate needs two devices, and there is one", fix)
    first = division if isinstance(division, int) and division else max(1, count // 2)
    if not 0 < first < count:
        reason = f"leaves {count - first} of {count} devices to train"
        raise RecipeError.of("placement.fractions", reason, "leave some devices to each side")
    return {role: devices[:first] if role == "generate" else devices[first:] for role in roles}


def _nothing_beside(roles: frozenset[str], division: Division) -> str | None:
    """What there is to lay side by side, with these shares."""
    if not roles & {"reference", "reward", "value"}:
        return "the step has the policy alone, so there is nothing to lay side by side"
    if division == PRESETS["I1"] and not {"reference", "reward"} <= roles:
        return "it lays the reference beside a reward model, and the step has only one of them"
    if division == PRESETS["I2"] and not roles & {"reward", "value"}:
        return "it lays critic and reward model beside the policy, and the step has neither"
    return None


STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            name="flatten",
            sentence="every step generates, then scores{asking}, then trains, on all of them",
            flow="phased",
            places=_everywhere,
            least_devices=1,
            seconds=closed_forms.one_after_the_other,
        ),
        Strategy(
            name="interleave",
            sentence="every step generates, then scores{asking}, then trains; what lies side by side runs together",
            flow="phased",
            places=_side_by_side,
            presets=PRESETS,
            groups=lambda roles: groupings(roles),
            cannot=_nothing_beside,
            seconds=closed_forms.one_after_the_other,
        ),
        Strategy(
            name="separate",
            sentence="some generate, the others score{asking} and train what is finished",
            flow="streamed",
            places=_apart,
            generates_apart=True,
            seconds=closed_forms.side_by_side,
        ),
        Strategy(
            name="elastic",
            sentence="all of them generate, and those that are done score{asking} and train what is finished",
            flow="streamed",
            tail={"move": True, "gate": 1.5},
            places=_everywhere,
            seconds=closed_forms.with_moving_tails,
        ),
    )
}
"""Name -> strategy, in the order in which they are listed."""


def rows(devices: Sequence[Any], roles: frozenset[str], shares: Sequence[Fraction]) -> Places:
    """Models are laid first-fit into rows of sum 1; those in a row lie side by side."""
    if len(shares) != len(MODELS):
        raise _fractions(f"has {len(shares)} numbers", f"give four, for {', '.join(MODELS)}")
    count, filled, places = len(devices), list[Fraction](), dict[str, Sequence[Any]]()
    for (model, played), share in zip(MODELS.items(), shares, strict=True):
        if not 0 < share <= 1:
            raise _fractions(f"gives {share} of the devices to the {model}", "use shares above 0, up to 1")
        if (share * count).denominator != 1:
            raise _fractions(f"gives {share} of {count} devices to the {model}", "use shares that fit the devices")
        row = next((index for index, full in enumerate(filled) if full + share <= 1), len(filled))
        if row == len(filled):
            filled.append(Fraction(0))
        first = int(filled[row] * count)
        filled[row] += share
        places |= {role: devices[first : first + int(share * count)] for role in played if role in roles}
    if any(full != 1 for full in filled):
        raise _fractions(f"{_told(shares)} leaves devices without work", "use shares that add up to whole rows")
    return places


def _told(shares: Sequence[Any], devices: int | None = None) -> str:
    if is_partition(shares):
        return " ".join(f"{'+'.join(group.models)}:{group.share * (devices or 1)}" for group in shares)
    return f"({', '.join(map(str, shares))})"


def groupings(roles: frozenset[str]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Every way to lay the models of a step side by side in groups; none for a step with one model."""
    models = [model for model, played in MODELS.items() if not roles.isdisjoint(played)]
    return tuple(groups for groups in set_partitions(models) if len(groups) > 1)


def _fractions(reason: str, fix: str) -> RecipeError:
    return RecipeError(Problem(field="placement.fractions", reason=reason, fix=fix))


def _plan(strategy: Strategy, layout: StrategyInputs, places: Places) -> Plan:
    """Cells of each role on its devices, and the order in which each device serves them."""
    cells: list[Cell] = []
    for role in sorted(places, key=ORDER.index):
        usual = layout.width.get("fit", 1) if role == "value" and "fit" in places else 1  # which has the critic
        width, devices = layout.width.get(role, usual), tuple(places[role])
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
    trainers = WeightSources(cells)
    cells = [trainers.with_weights(cell) if cell.role in layout.reading else cell for cell in cells]
    if strategy.flow == "phased":
        cells = [_given_back(cell) for cell in cells]
    cells = [with_own_weights(cell) for cell in cells]
    return Plan(
        strategy=strategy.name,
        flow=strategy.flow,
        staleness=layout.staleness,
        optimizer=layout.optimizer,
        cells=tuple(cells),
        priority=priority_of(cells, layout.devices),
        tail=strategy.tail,
    )


def _given_back(cell: Cell) -> Cell:
    """What was gathered to be read leaves its memory to the training that it was gathered from."""
    return replace(cell, sleeps=("train",)) if cell.weights.startswith("gather:") and cell.role != "value" else cell


def with_own_weights(cell: Cell) -> Cell:
    """An engine in a process of its own has its own weights, wherever its devices are."""
    apart = cell.role == "generate" and cell.engine != "native" and not is_plugin(cell.engine or "")
    return replace(cell, weights="own") if apart else cell


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
                shards = cell.role == "generate" and cell.mesh.get("ep", 1) == 1  # which it gathers at every token
                same = alike and (shards or trainer.mesh.get("dp_shard", 1) == 1)
                return replace(cell, weights=f"{'shared' if same else 'gather'}:{trainer.name}")
        return cell


def priority_of(cells: Iterable[Cell], devices: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Device -> names of its cells, in this order."""
    found: dict[str, list[str]] = {device: [] for device in devices}
    for cell in cells:
        for device in dict.fromkeys(cell.devices):
            found[device].append(cell.name)
    return {device: tuple(names) for device, names in found.items()}
