"""Placements to compare with, as strategies that are priced and never chosen: of others, and of a user's mind.

A baseline is laid out and priced like any strategy, but no recipe can name it and `auto` never takes it. `GIVEN` lays
roles where a user says: its division is the places themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from stretto.placement import closed_forms
from stretto.placement.partitions import RolePlace
from stretto.placement.strategies import STRATEGIES, Division, Places, Strategy


def _as_given(devices: Sequence[Any], roles: frozenset[str], division: Division) -> Places:
    places = cast(tuple[RolePlace, ...], division)
    return {place.role: devices[place.first : place.first + place.size] for place in places}


BASELINES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        replace(
            STRATEGIES["flatten"],
            name="baseline ZeRO-3",
            sentence="every stage runs on all of them, with parameters gathered for each layer, at every token too",
            gathers=True,
            least_devices=2,
        ),
        replace(
            STRATEGIES["separate"],
            name="baseline split, phased",
            sentence="some generate; when the last answer is there, the others score{asking} and train",
            flow="phased",
            seconds=closed_forms.one_after_the_other,
        ),
    )
}
"""Name -> what others do: a hybrid of generating and training in one sharded layout, and devices that wait in turns."""

GIVEN: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        replace(STRATEGIES["flatten"], name="yours", places=_as_given),
        replace(
            STRATEGIES["separate"], name="yours, streamed", places=_as_given, generates_apart=False, least_devices=1
        ),
        replace(STRATEGIES["elastic"], name="yours, with moving tails", places=_as_given, least_devices=1),
    )
}
"""Name -> a placement by hand: stages that wait for each other, that flow, that flow with tails that move."""


def record_of(name: str) -> Strategy:
    """The record of a strategy or of something to compare with."""
    return STRATEGIES.get(name) or BASELINES.get(name) or GIVEN[name]
