"""What is wrong with a plan, generated or written by hand: everything at once, each with where, why and a fix.

A plan that passes can be executed as it stands: every stage is served, every device exists, every copy of a trained
model has one layout, and nothing in the plan is without effect. Whether it fits into memory, or is any good, is not
asked here. Rules are one function each; they look at a plan, the roles that a step needs and the devices there are.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from stretto.errors import Problem
from stretto.placement.plan import Cell, Plan, meetings
from stretto.placement.strategies import ORDER
from stretto.plugins import is_plugin

DEGREES = ("dp_shard", "tp", "pp", "ep")
"""Keys of a mesh."""

ENGINES = ("native", "vllm", "sglang")
"""What may generate."""

LISTED = 8
"""Names that a message lists at most."""

TRAINERS = {"generate": "train", "reference": "train", "value": "fit"}
"""Role -> the role whose tensors it may read."""

UPDATE = ("train", "fit")
"""Roles that train a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """A plan and what it is for."""

    plan: Plan
    """What is judged."""
    roles: frozenset[str]
    """Roles that a step needs."""
    devices: tuple[str, ...]
    """Devices that there are."""
    updates: int
    """Optimizer updates of a step."""

    def cells(self) -> Iterator[tuple[str, Cell]]:
        """Every cell, with the name of its place in a recipe."""
        for index, cell in enumerate(self.plan.cells):
            yield f"placement.cells.{index}", cell

    @property
    def by_name(self) -> dict[str, Cell]:
        """The cells; of several with one name, the last."""
        return {cell.name: cell for cell in self.plan.cells}


def problems(plan: Plan, *, roles: Iterable[str], devices: Sequence[str], updates: int = 1) -> list[Problem]:
    """Everything wrong with a plan for a step of these roles on these devices."""
    case = PlanContext(plan=plan, roles=frozenset(roles), devices=tuple(devices), updates=updates)
    return [problem for rule in RULES for problem in rule(case)]


def hint(word: str, names: Iterable[str]) -> str:
    """The fix for a name that there is not: the nearest one, or those that there are."""
    known = list(dict.fromkeys(names))
    if near := difflib.get_close_matches(word, known, n=1, cutoff=0.5):
        return f"did you mean {near[0]}?"
    return f"use one of {_listed(known)}" if known else "take it out"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def names_are_unique(case: PlanContext) -> Iterator[Problem]:
    """A cell is known by its name: in priorities, in weights, in timelines."""
    seen: set[str] = set()
    for field, cell in case.cells():
        if cell.name in seen or not cell.name:
            reason = f"another cell is called {cell.name} too" if cell.name else "a cell has no name"
            yield Problem(field=f"{field}.name", reason=reason, fix="give each cell a name of its own")
        seen.add(cell.name)


def roles_are_needed(case: PlanContext) -> Iterator[Problem]:
    """A role that nobody knows, and one that the step has no work for."""
    for field, cell in case.cells():
        if cell.role not in ORDER:
            reason = f"there is no role {cell.role!r}"
            yield Problem(field=f"{field}.role", reason=reason, fix=hint(cell.role, ORDER))
        elif cell.role not in case.roles:
            reason = f"{cell.name} has no work: nothing in this recipe needs the stage {cell.role}"
            yield Problem(field=f"{field}.role", reason=reason, fix="take the cell out, or ask for what it serves")


def stages_are_served(case: PlanContext) -> Iterator[Problem]:
    """A step waits forever for a stage without a cell."""
    served = {cell.role for cell in case.plan.cells}
    for role in sorted(case.roles - served, key=ORDER.index):
        yield Problem(field="placement.cells", reason=f"no cell serves the stage {role}", fix=f"add one: role: {role}")


def devices_exist(case: PlanContext) -> Iterator[Problem]:
    """Every cell has devices, each once, and all of them are there."""
    there = set(case.devices)
    asked = case.plan.devices
    short = len(asked) > len(there)
    if short:
        missing = _listed([device for device in asked if device not in there])
        reason = f"need {len(asked)} devices, see {len(there)}: {missing} cannot be found"
        yield Problem(field="placement.cluster", reason=reason, fix="use fewer devices, or make the others visible")
    for field, cell in case.cells():
        if not cell.devices:
            fix = f"name one or more, such as {case.devices[0] if case.devices else 'localhost/cpu:0'}"
            yield Problem(field=f"{field}.devices", reason=f"{cell.name} has no device", fix=fix)
        for device, times in Counter(cell.devices).items():
            if times > 1:
                reason = f"{cell.name} names {device} {times} times"
                yield Problem(field=f"{field}.devices", reason=reason, fix="name each device once")
            if device not in there and not short:
                reason = f"there is no device {device}"
                yield Problem(field=f"{field}.devices", reason=reason, fix=hint(device, case.devices))


def meshes_fit(case: PlanContext) -> Iterator[Problem]:
    """Degrees divide the devices of a cell between them; experts are spread over ranks that are there anyway."""
    for field, cell in case.cells():
        yield from _mesh_problems(f"{field}.mesh", cell)


def _mesh_problems(field: str, cell: Cell) -> Iterator[Problem]:
    for key in cell.mesh:
        if key not in DEGREES:
            yield Problem(field=f"{field}.{key}", reason=f"there is no degree {key!r}", fix=hint(key, DEGREES))
    degrees = {key: cell.mesh.get(key, 1) for key in DEGREES}
    if low := [key for key, degree in degrees.items() if degree < 1]:
        yield Problem(field=f"{field}.{low[0]}", reason=f"is {degrees[low[0]]}", fix="use 1 or more")
        return
    experts, ranks = degrees.pop("ep"), math.prod(degrees.values())
    if ranks != len(cell.devices):
        told = " x ".join(f"{key} {degree}" for key, degree in degrees.items())
        reason = f"{told} is {ranks} ranks, and {cell.name} has {len(cell.devices)} devices"
        yield Problem(field=field, reason=reason, fix="let the product of the three be the number of devices")
    elif ranks // degrees["pp"] % experts:
        reason = f"ep {experts} does not divide the {ranks // degrees['pp']} ranks that hold a layer"
        yield Problem(field=f"{field}.ep", reason=reason, fix="use a divisor of them, such as 1")


def copies_are_alike(case: PlanContext) -> Iterator[Problem]:
    """Shard i of one copy reduces with shard i of every other, so all copies that train have one layout."""
    first: dict[str, Cell] = {}
    holders: dict[tuple[str, str], str] = {}
    for field, cell in case.cells():
        if cell.role not in UPDATE:
            continue
        one = first.setdefault(cell.role, cell)
        if _layout(cell) != _layout(one):
            reason = f"{cell.name} and {one.name} train one model in two layouts: {_told(cell)}, and {_told(one)}"
            yield Problem(field=f"{field}.mesh", reason=reason, fix=f"give all {cell.role} cells the same layout")
        for device in cell.devices:
            if (other := holders.setdefault((cell.role, device), cell.name)) != cell.name:
                reason = f"{cell.name} and {other} both train on {device}, and two copies there gain nothing"
                yield Problem(field=f"{field}.devices", reason=reason, fix="give each copy devices of its own")


def _layout(cell: Cell) -> tuple[int, ...]:
    return len(cell.devices), *(cell.mesh.get(key, 1) for key in DEGREES)


def _told(cell: Cell) -> str:
    degrees = ", ".join(f"{key} {cell.mesh[key]}" for key in DEGREES if cell.mesh.get(key, 1) > 1)
    count = f"{len(cell.devices)} device{'' if len(cell.devices) == 1 else 's'}"
    return f"{count} ({degrees})" if degrees else count


def weights_have_a_source(case: PlanContext) -> Iterator[Problem]:
    """own, or the tensors of a cell that trains the same model on the same devices."""
    for field, cell in case.cells():
        if cell.weights != "own" and (found := _weights_problem(cell, case.by_name)):
            yield Problem(field=f"{field}.weights", reason=found[0], fix=found[1])


def _weights_problem(cell: Cell, cells: dict[str, Cell]) -> tuple[str, str] | None:
    kind, colon, name = cell.weights.partition(":")
    if kind not in ("shared", "gather") or not colon:
        return f"{cell.weights!r} says nothing", "use own, shared:CELL or gather:CELL"
    trainer = TRAINERS.get(cell.role)
    if trainer is None:
        return f"{cell.role} cells hold weights of their own", "use own"
    able = [other.name for other in cells.values() if other.role == trainer]
    if name not in cells:
        return f"there is no cell {name!r}", hint(name, able)
    source = cells[name]
    if source.role != trainer:
        return f"{name} does not train the model that {cell.name} needs", hint(name, able)
    if not set(cell.devices) <= set(source.devices):
        return f"{cell.name} has devices that {name} does not have", f"use own, or devices of {name}"
    if kind == "shared" and set(cell.devices) != set(source.devices):
        return f"{name} spreads the same tensors over more devices than {cell.name} has", f"use gather:{name}"
    return None


def slices_are_asked_together(case: PlanContext) -> Iterator[Problem]:
    """A device that has a slice of a model answers only together with those that have the others."""
    sliced = [cell for cell in case.plan.cells if case.plan.in_slices(cell)]
    for field, cell in case.cells():
        for other in sliced:
            asks = cell.role == other.role or (cell.role, other.role) == ("value", "fit")
            shared, same = set(cell.devices) & set(other.devices), set(cell.devices) == set(other.devices)
            if cell.name != other.name and asks and shared and not same and cell.role not in UPDATE:
                there = _listed(sorted(shared))
                reason = f"{cell.name} needs all of a model that {other.name} has in slices on {there}"
                fix = f"give {cell.name} all devices of {other.name}, or none of them"
                yield Problem(field=f"{field}.devices", reason=reason, fix=fix)
                break
    try:
        meetings(sliced)
    except ValueError as error:
        fix = "name devices in one order in all cells of several"
        yield Problem(field="placement.cells", reason=f"models are cut in order, and {error}", fix=fix)


def engines_generate(case: PlanContext) -> Iterator[Problem]:
    """An engine is what a generate cell runs, and only such a cell; ours alone is told its share of memory here."""
    for field, cell in case.cells():
        if cell.memory_share is not None and (cell.role, cell.engine) != ("generate", "native"):
            reason = f"has no effect, because {cell.name} has no native engine"
            yield Problem(field=f"{field}.memory_share", reason=reason, fix="leave it out, or say engine.memory_share")
        if cell.role != "generate" and cell.engine is not None:
            reason = f"has no effect, because {cell.name} generates nothing"
            yield Problem(field=f"{field}.engine", reason=reason, fix="leave it out")
        if cell.role == "generate" and cell.engine not in ENGINES and not is_plugin(cell.engine or ""):
            reason = f"there is no engine {cell.engine!r}" if cell.engine else f"{cell.name} has none"
            yield Problem(field=f"{field}.engine", reason=reason, fix=hint(cell.engine or "", ENGINES))


def optimizer_sleeps(cell: Cell) -> bool:
    """True if a cell's optimizer leaves its memory to what generates, and nothing else of it sleeps: its gradients are
    added up meanwhile, and masters and moments are read by the update alone."""
    return cell.role in UPDATE and tuple(cell.sleeps) == ("generate",)


def devices_generate_in_one_cell(case: PlanContext) -> Iterator[Problem]:
    """A device that generates with others has a part of the model, and no engine beside that."""
    on: dict[str, Cell] = {}
    for field, cell in case.cells():
        if cell.role != "generate":
            continue
        for device in cell.devices:
            other = on.setdefault(device, cell)
            if other is not cell and max(len(cell.devices), len(other.devices)) > 1:
                reason = f"{cell.name} and {other.name} both generate on {device}, with a part of the model there"
                yield Problem(field=f"{field}.devices", reason=reason, fix="give each of them devices of its own")


def cells_sleep_while_others_work(case: PlanContext) -> Iterator[Problem]:
    """A phase in which a cell leaves its memory to others is a time of its own, and theirs, on the same devices."""
    on = case.plan.roles_on
    for field, cell in case.cells():
        if case.plan.flow == "streamed" and cell.sleeps and not optimizer_sleeps(cell):
            reason = "where stages flow only an optimizer can sleep, until its update: what else a device holds would "
            reason += "move with every piece of work"
            fix = "let train cells say sleeps: [generate], and others nothing; or use placement.strategy: flatten"
            yield Problem(field=f"{field}.sleeps", reason=reason, fix=fix)
            continue
        there = {role for device in cell.devices for role in on[device]}
        for phase in cell.sleeps:
            if phase not in ORDER:
                reason = f"there is no phase {phase!r}"
                yield Problem(field=f"{field}.sleeps", reason=reason, fix=hint(phase, ORDER))
            elif phase == cell.role:
                reason = f"{cell.name} works in the phase {phase} and cannot sleep in it"
                yield Problem(field=f"{field}.sleeps", reason=reason, fix="leave that phase out")
            elif phase not in there:
                reason = f"no cell works in the phase {phase} on the devices of {cell.name}"
                yield Problem(field=f"{field}.sleeps", reason=reason, fix="leave that phase out")


def devices_know_whom_to_serve(case: PlanContext) -> Iterator[Problem]:
    """The order of a device names exactly the cells that are on it, each once."""
    on: dict[str, list[str]] = {}
    for cell in case.plan.cells:
        for device in cell.devices:
            on.setdefault(device, []).append(cell.name)
    for device in dict.fromkeys((*on, *case.plan.priority)):
        field, order = f"priority.{device}", case.plan.priority.get(device, ())
        here = list(dict.fromkeys(on.get(device, ())))
        for name, times in Counter(order).items():
            if name not in case.by_name:
                yield Problem(field=field, reason=f"there is no cell {name!r}", fix=hint(name, here))
            elif name not in here:
                yield Problem(field=field, reason=f"the cell {name} is not on this device", fix="take it out")
            elif times > 1:
                yield Problem(field=field, reason=f"names {name} {times} times", fix="name it once")
        if missing := [name for name in here if name not in order]:
            reason = f"says nothing about {_listed(missing)}, which would never be served"
            yield Problem(field=field, reason=reason, fix="name every cell that is on this device, first served first")


def staleness_is_possible(case: PlanContext) -> Iterator[Problem]:
    """A sampler may lag by one version where what generates has devices of its own, and nothing waits for it."""
    staleness, field = case.plan.staleness, "placement.staleness"
    if staleness == 0:
        return
    separate = "use 0, or placement.strategy: separate, which needs two devices in placement.cluster"
    if staleness != 1:
        yield Problem(field=field, reason=f"{staleness} versions are not possible", fix="use 0 or 1")
        return
    others = {device: cell for cell in case.plan.cells if cell.role != "generate" for device in cell.devices}
    shared = {c.name: others[d] for c in case.plan.cells if c.role == "generate" for d in c.devices if d in others}
    if shared:
        name, other = next(iter(shared.items()))
        reason = f"1 needs devices that only generate, and {name} shares its own with {other.name}"
        yield Problem(field=field, reason=reason, fix=separate)
    elif case.plan.flow == "phased":
        reason = "1 has no effect where every stage waits for the one before"
        yield Problem(field=field, reason=reason, fix=separate)
    if case.updates > 1:
        several = f"{case.updates} updates of a step (batch.updates, batch.epochs)"
        reason = f"1 beside {several} would be off-policy twice over"
        yield Problem(field=field, reason=reason, fix="use 0, or one update a step")


RULES: tuple[Callable[[PlanContext], Iterable[Problem]], ...] = (
    names_are_unique,
    roles_are_needed,
    stages_are_served,
    devices_exist,
    meshes_fit,
    copies_are_alike,
    weights_have_a_source,
    slices_are_asked_together,
    engines_generate,
    devices_generate_in_one_cell,
    cells_sleep_while_others_work,
    devices_know_whom_to_serve,
    staleness_is_possible,
)
"""In the order in which their problems are listed."""
