"""Training cells of two devices, each device a process that holds slices: the weights of one device."""

import asyncio
from dataclasses import replace

import pytest

from crewed import alone, dies, distance, read, steps
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


async def wide(recipe, folder, cells, killed, optimizer):
    """State and reports of some steps on these cells, in which the process of a device is killed that only generates.

    One that trains would take its slices with it.
    """
    placement = recipe.placement.model_copy(update={"cells": tuple(cells), "strategy": "elastic"})
    names = list(dict.fromkeys(device for each in cells for device in each["devices"]))
    plan = replace(plan_of(placement, roles=roles_of(recipe), devices=sorted(names)), optimizer=optimizer)
    launcher = processes(names, seconds=120, make=worker_of)
    parts = await build_runtime(recipe, plan=plan, root=folder, folder=folder, note=print, launcher=launcher)
    try:
        if killed:
            dies(killed, "generate")(parts.worker_group)
        reports = await steps(parts, Clock(devices=parts.devices))
        await parts.worker_group.files.save(folder / "saved")
        with pytest.raises(TrainingError, match="its part of the optimizer with it"):
            await parts.worker_group.recovery.revive(parts.worker_group.trainers[1])
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
REFERRED = [*TOGETHER, cell("reference", 0, 1)]
TWICE = [cell("generate", 0), cell("train", 0, 1), cell("train", 2, 3)]
REFERENCE = {"algorithm__kl": {"coef": 0.1, "estimator": "k2"}}


@pytest.mark.parametrize(
    ("cells", "killed", "changes", "optimizer"),
    [
        (TOGETHER, None, {}, "replicated"),
        (APART, "localhost/cpu:0", {"model__adapter": LORA, **REFERENCE, "model__quantize": "nf4"}, "replicated"),
        (REFERRED, None, REFERENCE, "replicated"),
        (TWICE, None, {"batch": {"prompts": 2, "samples": 3}}, "replicated"),
        (TWICE, None, {"optimizer__clip": 0.001}, "sharded"),
        (TWICE, None, {"batch": {"prompts": 2, "samples": 3, "updates": 3}}, "replicated"),
    ],
    ids=[
        "full, recomputed",
        "lora on four bits",
        "a reference in slices",
        "two cells",
        "a shared optimizer",
        "two cells, three updates",
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
