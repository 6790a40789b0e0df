"""The plan of a recipe on the devices that there are."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from stretto.algorithms.base import Algorithm
from stretto.algorithms.catalog import learns_from_rows
from stretto.placement.build import devices_for, plan_of
from stretto.placement.cluster import Cluster, Host, parse_cluster
from stretto.placement.plan import Cell, Plan
from stretto.placement.strategies import DEFAULT
from stretto.recipe.describe import reading_roles, reads_policy, roles_of
from stretto.recipe.schema import Placement, Recipe

LONE = ("auto", "1xcpu", "1xgpu")
"""Clusters that name no device: the first of them may be those of cells by hand, the others are one."""


def make_plan(recipe: Recipe, *, width: int = 1) -> Plan:
    """Where everything lives, with so many devices in a training cell that a strategy makes."""
    return plan_of(
        recipe.placement,
        roles=roles_of(recipe),
        devices=devices_of(recipe.placement),
        reading=reading_roles(recipe),
        width=dict.fromkeys(("train", "fit"), width),
        engine=recipe.engine.kind,
        updates=recipe.batch.updates_a_step,
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


def cluster_of_run(recipe: Recipe) -> Cluster:
    """The run's devices, as the planner knows them."""
    told, devices = recipe.placement.cluster, devices_of(recipe.placement)
    if told not in LONE:
        return parse_cluster(told)
    if torch.cuda.is_available() and told != "1xcpu":
        return parse_cluster(f"{len(devices)}x{torch.cuda.get_device_name()}")
    cluster = parse_cluster(f"{len(devices)}xcpu")
    if len(devices) > 1:
        return cluster
    host, threads = cluster.hosts[0], torch.get_num_threads()
    numbers = ("flops", "matmul", "bandwidth")
    scaled = {name: threads * getattr(host.device, name) for name in numbers}
    device = replace(host.device, threads=threads, **scaled)
    return replace(cluster, hosts=(Host(name=host.name, device=device, count=1, memory=host.memory),))


def sliced_cells(recipe: Recipe, plan: Plan) -> list[Cell]:
    """Cells whose devices have slices of a model. A reference that is the policy without its adapter has no weights."""
    reads = reads_policy(recipe)
    return [cell for cell in plan.cells if plan.in_slices(cell) and not (reads and cell.role == "reference")]


def whitens_gradients(recipe: Recipe, plan: Plan, algorithm: Algorithm) -> bool:
    """True if groups are trained as they finish though their credit is whitened over all of them: where stages flow,
    and the weights have not moved since they sampled."""
    moved = recipe.batch.updates_a_step > 1 or plan.staleness > 0
    wide = any(cell.role == "train" and len(cell.devices) > 1 for cell in plan.cells)
    return algorithm.unwhitened is not None and plan.flow == "streamed" and not (moved or wide)
