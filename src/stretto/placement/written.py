"""A placement that a user has in mind, as `stretto plan` takes it by --cells and --mesh: a plan, or roles with devices.

A file is a plan as in plan.json, a list of cells, or a mapping of roles or models to devices and a mesh. What comes out
is a plan that `build.plan_of` made, so that it went through every rule; whether it fits is not asked here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.errors import Problem, RecipeError
from stretto.placement.build import plan_of
from stretto.placement.plan import Plan
from stretto.placement.strategies import DEFAULT, MODELS, ORDER, STRATEGIES
from stretto.placement.validate import hint
from stretto.recipe import yaml_io
from stretto.recipe.schema import Placement

FLOWS = {"phased": DEFAULT, "streamed": "separate"}
"""Flow -> a strategy that has it, where a file names no other."""

MESH = re.compile(r"(?P<role>[a-z]+)=(?P<devices>.+?)(?::(?P<mesh>[a-z_]+=.+))?")
"""train=0-7:dp_shard=8"""

DEGREE = re.compile("[0-9]{1,9}")
"""A number of devices."""


def plan_of_file(path: Path, **about: Any) -> Plan:
    """The plan of a file; `about` is as in `plan_of_mapping`."""
    try:
        data, problems = yaml_io.read(path.read_text(encoding="utf-8"), name=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError.of("--cells", f"{path} cannot be read: {error}", "name a file with a plan") from None
    if problems:
        raise RecipeError(*problems)
    if isinstance(data, list):
        data = {"cells": data}
    if not isinstance(data, Mapping):
        fix = "write a plan as in plan.json, or roles with devices: {train: {devices: 0-7, mesh: {dp_shard: 8}}}"
        raise RecipeError.of("--cells", f"{path} holds no plan", fix)
    return plan_of_mapping(data, field="--cells", **about)


def plan_of_texts(texts: Sequence[str], **about: Any) -> Plan:
    """The plan of texts such as train=0-7:dp_shard=8 and flow=streamed."""
    told: dict[str, Any] = {}
    for text in texts:
        match = MESH.fullmatch(text.strip())
        if match is None:
            fix = "write ROLE=DEVICES:DEGREES, such as train=0-7:dp_shard=8 or generate=all:tp=4"
            raise RecipeError.of("--mesh", f"{text!r} says no role with its devices", fix)
        name, value = match["role"], match["devices"]
        if name in ("flow", "strategy"):
            told[name] = value
            continue
        degrees = (part.partition("=") for part in (match["mesh"] or "").split(",") if part)
        mesh = {key.strip(): int(number) if DEGREE.fullmatch(number) else number for key, _, number in degrees}
        told[name] = {"devices": value, "mesh": mesh}
    return plan_of_mapping(told, field="--mesh", **about)


def plan_of_mapping(
    told: Mapping[str, Any], *, field: str, roles: Iterable[str], devices: Sequence[str], **others: Any
) -> Plan:
    """A plan as plain data for a step of these roles on these devices; `others` as in `build.plan_of`."""
    needed = frozenset(roles)
    cells = told.get("cells")
    if cells is None:
        entries = [(name, entry) for name, entry in told.items() if name not in KEYS]
        cells = [cell for name, entry in entries for cell in _cells(name, entry, needed, devices, field)]
    strategy = _strategy(told, field)
    try:
        section = Placement(strategy=strategy, cells=tuple(dict(cell) for cell in cells))
        plan = plan_of(section, roles=needed, devices=devices, **others)
    except (TypeError, ValueError):
        raise RecipeError.of(field, "cells are no list of sections", "give each cell a role and devices") from None
    except RecipeError as error:
        raise RecipeError(*(_renamed(problem, field) for problem in error.problems)) from None
    flow, tail = told.get("flow", plan.flow), told.get("tail", plan.tail)
    optimizer = told.get("optimizer", plan.optimizer)
    if optimizer not in ("replicated", "sharded"):
        raise RecipeError.of(f"{field}: optimizer", f"is {optimizer!r}", "use replicated or sharded")
    moves = dict(tail) if isinstance(tail, Mapping) else dict(plan.tail)
    return replace(plan, strategy="yours", flow=flow, tail=moves, optimizer=optimizer)


KEYS = (
    "cells",
    "flow",
    "strategy",
    "tail",
    "optimizer",
    "staleness",
    "priority",
    "predicted",
    "measured",
    "reward_workers",
)
"""Keys of a plan; every other one is a role or a model."""


def _strategy(told: Mapping[str, Any], field: str) -> str:
    """A strategy whose flow the plan has."""
    name, flow = told.get("strategy"), told.get("flow")
    if flow is not None and (not isinstance(flow, str) or flow not in FLOWS):
        raise RecipeError.of(f"{field}: flow", f"there is no flow {flow!r}", hint(str(flow), FLOWS))
    if isinstance(name, str) and name in STRATEGIES:
        return name
    return FLOWS[str(flow)] if flow is not None else DEFAULT


def _cells(name: str, entry: Any, roles: frozenset[str], devices: Sequence[str], field: str) -> list[dict[str, Any]]:
    """Cells of a role, or of all roles that a model plays in the step: as many as its devices make."""
    played = [role for role in MODELS.get(name, (name,)) if role in roles or name not in MODELS]
    if name not in MODELS and name not in ORDER:
        raise RecipeError.of(f"{field}: {name}", f"there is no role {name!r}", hint(name, (*ORDER, *MODELS)))
    if not played:
        reason = f"{name} has no work: nothing in this recipe needs it"
        raise RecipeError.of(f"{field}: {name}", reason, "leave it out, or ask for what it serves")
    told = entry if isinstance(entry, Mapping) else {"devices": entry}
    there = _devices(told.get("devices", "all"), devices, f"{field}: {name}")
    mesh = told.get("mesh") or {}
    degrees = [mesh.get(key, 1) for key in ("dp_shard", "tp", "pp")] if isinstance(mesh, Mapping) else [0]
    if not all(isinstance(degree, int) and degree > 0 for degree in degrees):
        raise RecipeError.of(f"{field}: {name}", "degrees are whole numbers above 0", "write such as dp_shard=2,tp=4")
    width = math.prod(degrees)
    if len(there) % width:
        reason = f"{width} devices a cell do not divide the {len(there)} of {name}"
        raise RecipeError.of(f"{field}: {name}", reason, "let the degrees divide the devices")
    groups = [there[start : start + width] for start in range(0, len(there), width)]
    rest = {key: value for key, value in told.items() if key not in ("devices", "mesh")}
    return [{"role": role, "devices": tuple(group), "mesh": dict(mesh), **rest} for role in played for group in groups]


def _devices(told: Any, devices: Sequence[str], field: str) -> list[str]:
    """Names, from names, numbers, a range such as 0-7, or `all`."""
    if told == "all":
        return list(devices)
    parts = told if isinstance(told, (list, tuple)) else str(told).split("+")
    found: list[str] = []
    for part in parts:
        text = str(part).strip()
        if text in devices:
            found.append(text)
        elif (match := re.fullmatch(r"(\d+)(?:-(\d+))?", text)) and int(match[2] or match[1]) < len(devices):
            found += devices[int(match[1]) : int(match[2] or match[1]) + 1]
        else:
            fix = f"use all, numbers from 0 to {len(devices) - 1} such as 0-3, or names such as {devices[0]}"
            raise RecipeError.of(field, f"there is no device {text!r} among {len(devices)}", fix)
    return found


def _renamed(problem: Problem, field: str) -> Problem:
    """A problem of a section, of which the user has only written a file or an option."""
    where = problem.field.removeprefix("placement.")
    return replace(problem, field=field if where in ("cells", "cluster") else f"{field}: {where}")
