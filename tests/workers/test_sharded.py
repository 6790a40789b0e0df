"""Training cells of two devices, each device a process that holds slices: the weights of one device."""

import asyncio
from dataclasses import replace

import pytest

from crewed import alone, dies, distance, read, steps
from families import mixture_in
from running import recipe_in
from sequential import Sequential
from stretto.errors import TrainingError
from stretto.placement.build import plan_of
from stretto.recipe.describe import roles_of
from stretto.runtime.build import build_runtime
from stretto.runtime.spans import Clock
from stretto.workers.launchers.inprocess import processes, worker_of
from stretto.workers.shared_folder import listing

pytestmark = pytest.mark.slow

LORA = {"kind": "lora", "rank": 3, "alpha": 4}


def cell(role, *devices, **more):
    return {"role": role, "devices": [f"localhost/cpu:{device}" for device in devices], **more}


async def wide(recipe, folder, cells, killed=None, optimizer="replicated", since=None):
    """State and reports of some steps on these cells, in which the process of a device is killed that only generates.

    One that trains would take its slices with it. They go on from the state in a folder, if there is one.
    """
    placement = recipe.placement.model_copy(update={"cells": tuple(cells), "strategy": "elastic"})
    names = list(dict.fromkeys(device for each in cells for device in each["devices"]))
    plan = replace(plan_of(placement, roles=roles_of(recipe), devices=sorted(names)), optimizer=optimizer)
    launcher = processes(names, seconds=300, make=worker_of)
    parts = await build_runtime(recipe, plan=plan, root=folder, folder=folder, note=print, launcher=launcher)
    try:
        if killed:
            dies(killed, "generate")(parts.worker_group)
        if since:
            await parts.worker_group.restore(since)
        reports = await steps(parts, Clock(devices=parts.devices))
        await parts.worker_group.files.save(folder / "saved")
        with pytest.raises(TrainingError, match="its part of the optimizer with it"):
            await parts.worker_group.recovery.restart_worker(parts.worker_group.trainers[1])
        return folder / "saved" / "state", reports
    finally:
        await parts.close()


def weights_on_one(recipe, folder, held):
    """The weights that one device goes on with from this state."""
    plain = Sequential(recipe, folder)
    try:
        assert plain.worker.restore(held, listing(held))
        return plain.weights()
    finally:
        asyncio.run(plain.close())


TOGETHER = [cell("generate", 0), cell("generate", 1), cell("train", 0, 1, recompute=True)]
APART = [cell("generate", 0), cell("reference", 0), cell("train", 1, 2)]
TWICE = [cell("generate", 0), cell("train", 0, 1), cell("train", 2, 3)]
MATRICES = [cell("generate", 0), cell("train", 0, 1, mesh={"tp": 2}, recompute=True)]
GRID = [*(cell(role, 0, 1, 2, 3, mesh={"tp": 2}) for role in ("train", "reference")), cell("generate", 0)]
EXPERTS = [cell("generate", 0), cell("train", 0, 1, mesh={"ep": 2})]
REFERENCE = {"algorithm__kl": {"coef": 0.1, "estimator": "k2"}}


@pytest.mark.parametrize(
    ("cells", "killed", "changes", "optimizer"),
    [
        (TOGETHER, None, {}, "replicated"),
        (APART, "localhost/cpu:0", {"model__adapter": LORA, **REFERENCE, "model__quantize": "nf4"}, "replicated"),
        (TWICE, None, {"optimizer__clip": 0.001}, "sharded"),
        (TWICE, None, {"batch": {"prompts": 2, "samples": 3, "updates": 3}}, "replicated"),
        (GRID, None, REFERENCE, "replicated"),
    ],
    ids=[
        "full, recomputed",
        "lora on four bits",
        "a shared optimizer",
        "two cells, three updates",
        "slices of matrices, and a reference",
    ],
)
def test_a_cell_of_two_devices_ends_with_the_weights_of_one(cells, killed, changes, optimizer, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", **changes)
    single, reports = asyncio.run(alone(recipe, tmp_path))
    held, crewed = asyncio.run(wide(recipe, tmp_path, cells, killed, optimizer))
    assert distance(single, read(held)["optimizer"]["masters"]) < 1e-10
    assert distance(single, weights_on_one(recipe, tmp_path, held)) < 1e-10
    for name in ("loss", "grad_norm", "tokens/trained"):
        assert [report[name] for report in crewed] == pytest.approx([report[name] for report in reports], rel=1e-9)


def test_experts_in_few_bits_are_spread_over_the_devices_of_a_cell(tmp_path):
    mixture_in(tmp_path / "mixture")
    recipe = recipe_in(
        tmp_path,
        model={"name": "mixture", "dtype": "float64", "quantize": "int8", "adapter": LORA},
        optimizer__lr=1e-3,
    )
    with pytest.warns(UserWarning, match="experts in few bits stay as they are"):
        single, reports = asyncio.run(alone(recipe, tmp_path))
    held, crewed = asyncio.run(wide(recipe, tmp_path, EXPERTS))
    # The norms and the router of a stock model compute in fp32.
    assert distance(single, read(held)["optimizer"]["masters"]) < 1e-6
    for name in ("loss", "grad_norm", "tokens/trained"):
        assert [report[name] for report in crewed] == pytest.approx([report[name] for report in reports], rel=1e-5)


def test_what_matrices_left_slices_go_on_from(tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64")
    (held, _), folders = asyncio.run(wide(recipe, tmp_path, MATRICES)), [tmp_path / "first", tmp_path / "second"]
    ends = []
    for cells, folder in zip((GRID[:1] + GRID[2:], TOGETHER), folders, strict=True):
        folder.mkdir()
        ends.append(read(asyncio.run(wide(recipe, folder, cells, since=held))[0])["optimizer"]["masters"])
    assert distance(*ends) < 1e-10
    assert distance(ends[0], read(held)["optimizer"]["masters"]) > 1e-3, "and they have learned meanwhile"
