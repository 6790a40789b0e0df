"""Models in groups that lie side by side, each on devices of its own: {actor, reference} beside {critic, reward}.

A partition is a value: which models are together, and what share of the devices each group has. It is one kind of
`strategies.Division`; strategies lay it out, the planner looks for the best one, and a recipe may name one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeGuard

from stretto.errors import Problem, RecipeError

FIELD = "placement.fractions"


class ModelGroup(NamedTuple):
    """Models that share devices which no other model has."""

    models: tuple[str, ...]
    """Which, such as ("actor", "reference")."""
    share: Fraction
    """Of the devices."""


Partition = tuple[ModelGroup, ...]
"""Groups in the order of their devices; their shares add up to 1."""


class RolePlace(NamedTuple):
    """Where a user lays a role."""

    role: str
    """The role, by its name."""
    first: int
    """Index of its first device."""
    size: int
    """How many."""


def is_partition(division: object) -> TypeGuard[Partition]:
    """True for groups of models, false for shares by model and for all other divisions."""
    return isinstance(division, tuple) and bool(division) and isinstance(division[0], ModelGroup)


def set_partitions(models: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to put models into groups: 15 for four. The first model is in the first group."""
    if not models:
        yield ()
        return
    *before, last = models
    for groups in set_partitions(before):
        yield (*groups, (last,))
        for index, group in enumerate(groups):
            yield (*groups[:index], (*group, last), *groups[index + 1 :])


def lay_groups(
    devices: Sequence[Any], roles: Collection[str], groups: Partition, played: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[Any]]:
    """Role -> its devices; `played` has the roles of each model. A RecipeError where groups do not fit the devices."""
    count, first, places = len(devices), 0, dict[str, Sequence[Any]]()
    for group in groups:
        size = group.share * count
        if size.denominator != 1:
            fix = "use shares that are whole devices"
            raise RecipeError.of(FIELD, f"gives {group.share} of {count} devices to {'+'.join(group.models)}", fix)
        there = devices[first : first + int(size)]
        mine = {role: there for model in group.models for role in played[model] if role in roles}
        if not mine:
            reason = f"gives devices to {'+'.join(group.models)}, which the step does not have"
            raise RecipeError.of(FIELD, reason, "leave the group out")
        places |= mine
        first += int(size)
    lost = sorted({role for roles_of in played.values() for role in roles_of if role in roles} - places.keys())
    if lost:
        reason, fix = f"names no group with devices for the stage {lost[0]}", "put every model of the step in a group"
        raise RecipeError.of(FIELD, reason, fix)
    return places


def read_partition(
    told: Mapping[str, float | Fraction], models: Collection[str], *, count: int, close: float
) -> Partition:
    """A partition as a recipe writes it, {actor+reference: 0.75, critic+reward: 0.25}; shares that come as close as
    this to whole devices of so many are these."""
    groups, seen, problems = list[ModelGroup](), set[str](), list[Problem]()
    for text, share in told.items():
        named = tuple(name.strip() for name in text.split("+"))
        for name in named:
            if name not in models:
                fix = f"use names of {', '.join(models)}, joined by +"
                problems.append(Problem(field=f"{FIELD}.{text}", reason=f"there is no model {name!r}", fix=fix))
            elif name in seen:
                reason = f"the {name} is in two groups"
                problems.append(Problem(field=f"{FIELD}.{text}", reason=reason, fix="name each model once"))
            seen.add(name)
        exact = Fraction(str(share))
        near = Fraction(round(exact * count), count)
        groups.append(ModelGroup(named, near if abs(near - exact) < close else exact))
    if not problems and (whole := sum(group.share for group in groups)) != 1:
        fix = "give all groups together the share 1"
        problems.append(Problem(field=FIELD, reason=f"the shares of all groups add up to {whole}", fix=fix))
    if not problems and any(group.share <= 0 for group in groups):
        problems.append(Problem(field=FIELD, reason="a group has no devices", fix="use shares above 0"))
    if problems:
        raise RecipeError(*problems)
    return tuple(groups)
