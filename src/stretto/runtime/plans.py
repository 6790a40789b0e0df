"""The plan of a recipe on the devices that there are."""

from __future__ import annotations

import os

import torch

from stretto.algorithms.catalog import learns_from_rows
from stretto.placement.build import devices_for, plan_of
from stretto.placement.plan import Plan
from stretto.placement.strategies import DEFAULT
from stretto.recipe.describe import roles_of
from stretto.recipe.schema import Placement, Recipe


def make_plan(recipe: Recipe, *, width: int = 1) -> Plan:
    """Where everything lives, with so many devices in a training cell that a strategy makes.

    The reference reads the trainer's tensors where it is the adapter switched off.
    """
    return plan_of(
        recipe.placement,
        roles=roles_of(recipe),
        devices=devices_of(recipe.placement),
        reading={"generate", "reference"} if recipe.model.adapter else {"generate"},
        width={"train": width},
        engine=recipe.engine.kind,
        updates=recipe.batch.updates,
    )


def sampling_plan(recipe: Recipe) -> Plan:
    """Where to sample and judge without training: on every device, or on the cells by hand that do it in a step.

    What was trained on rows is asked by its trainer, too.
    """
    section = recipe.placement
    everywhere = {"strategy": DEFAULT, "fractions": None} if section.cells is None else {}
    section = section.model_copy(update={"staleness": 0, **everywhere})
    plan = make_plan(recipe.model_copy(update={"placement": section}))
    return plan if learns_from_rows(recipe.algorithm.name) else plan.only({"generate", "reward"})


def devices_of(section: Placement) -> tuple[str, ...]:
    """The devices that a recipe asks for; on this host, of those that there are."""
    return devices_for(section, devices_here())


def devices_here() -> list[str]:
    """Every device of this host."""
    gpus = [f"localhost/gpu:{index}" for index in range(torch.cuda.device_count())]
    return gpus + [f"localhost/cpu:{index}" for index in range(os.cpu_count() or 1)]
