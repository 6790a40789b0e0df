"""PPO and distillation on cells of several devices: critics trained in slices and frozen models that are cut."""

import asyncio
import copy
from dataclasses import replace

import pytest

from crewed import STEPS, distance, read, steps
from running import recipe_in, start
from sequential import Sequential
from stretto.errors import StateLostError
from stretto.placement.build import plan_of
from stretto.recipe.describe import reading_roles, roles_of
from stretto.runtime.build import build_runtime
from stretto.runtime.spans import Clock
from stretto.workers.launchers.inprocess import processes, worker_of
from stretto.workers.shared_folder import listing

pytestmark = pytest.mark.slow

RATE = 1e-4
LORA = {"kind": "lora", "rank": 3, "alpha": 4}
FOUR = {
    "model__dtype": "float64",
    "optimizer__lr": RATE,
    "roles": {"critic": {"name": "scratch", "optimizer": {"lr": RATE}}, "reward_model": {"name": "scratch"}},
    "rewards": [{"name": "accuracy", "kind": "numeric"}, {"name": "quality", "kind": "model", "weight": 0.5}],
    "algorithm": {"name": "ppo", "kl": {"coef": 0.1, "where": "reward"}},
}
"""Actor, critic, reference and reward model."""


def cell(role, *devices, **more):
    return {"role": role, "devices": [f"localhost/cpu:{device}" for device in devices], **more}


TOGETHER = [cell("generate", 0), *(cell(role, 0, 1) for role in ("reward", "reference", "value", "train"))]
TOGETHER += [cell("fit", 0, 1, recompute=True)]
OVERLAPPING = [cell("generate", 0), cell("train", 0, 1), cell("reference", 0, 1)]
OVERLAPPING += [cell(role, 1, 2) for role in ("reward", "value", "fit")]
READ = [cell("generate", 2), cell("train", 2), cell("reference", 2), cell("reward", 2), cell("value", 2)]
READ += [cell("fit", 0, 1)]
TWICE = [cell("generate", 0), cell("train", 0), cell("reference", 1), cell("reward", 1), cell("value", 2, 3)]
TWICE += [cell("fit", 0, 1), cell("fit", 2, 3)]


async def wide(recipe, folder, cells, optimizer, before):
    """State and reports of some steps on these cells; first they go on from the state `before`, and write it again."""
    placement = recipe.placement.model_copy(update={"cells": tuple(cells), "strategy": "elastic"})
    names = list(dict.fromkeys(device for each in cells for device in each["devices"]))
    plan = plan_of(placement, roles=roles_of(recipe), devices=sorted(names), reading=reading_roles(recipe))
    plan = replace(plan, optimizer=optimizer)
    launcher = processes(names, seconds=300, make=worker_of)
    parts = await build_runtime(recipe, plan=plan, root=folder, folder=folder, note=print, launcher=launcher)
    try:
        await parts.worker_group.restore(before)
        await parts.worker_group.save(folder / "again")
        reports = await steps(parts, Clock(devices=parts.devices))
        await parts.worker_group.save(folder / "saved")
        *_, last = (each for each in plan.cells if plan.in_slices(each))
        lost = "its part of the optimizer" if last.role == "fit" else "those that hold the other slices"
        with pytest.raises(StateLostError, match=lost):
            await parts.worker_group.recovery.restart_worker(last.devices[-1])
        return folder / "saved" / "state", folder / "again" / "state", reports
    finally:
        await parts.close()


def plainly(recipe, folder):
    """What one device holds before and after as many plain steps, and the reports."""
    plain = Sequential(recipe, folder)

    async def taken():
        write(plain, folder / "before")
        reports = [plain.learn((await plain.sampled()).samples, step=step) for step in range(1, STEPS + 1)]
        write(plain, folder / "after")
        await plain.close()
        return reports

    return asyncio.run(taken())


def write(plain, folder):
    """A checkpoint of one device, as its worker writes it."""
    folder.mkdir()
    for model in plain.worker.held_models:
        plain.worker.save(model, folder, listing(folder), 0, 1, False, None)
        while plain.worker.saved() is None:
            pass


def gone_on_from(recipe, folder, held):
    """Policy and critic that one device goes on with from this state."""
    plain = Sequential(recipe, folder)
    try:
        assert plain.worker.restore(held, listing(held))
        return plain.weights(), plain.critic() if plain.worker.critic else {}
    finally:
        asyncio.run(plain.close())


@pytest.mark.parametrize(
    ("cells", "optimizer", "changes"),
    [
        (TOGETHER, "replicated", {}),
        (TOGETHER, "replicated", {"model__adapter": LORA, "roles__critic__adapter": dict(LORA)}),
        (OVERLAPPING, "replicated", {"batch__updates": 2}),
        (READ, "replicated", {}),
        (TWICE, "sharded", {"roles__critic__warmup_steps": 1}),
        (OVERLAPPING[:-1], "replicated", {"roles__critic__optimizer": None}),
    ],
    ids=["one cell", "adapters", "cells that share a device", "read elsewhere", "two cells that share", "frozen"],
)
def test_ppo_on_cells_of_several_devices_ends_with_the_weights_of_one(cells, optimizer, changes, tmp_path):
    recipe = recipe_in(tmp_path, **copy.deepcopy(FOUR | changes))  # what it is given is written into
    reports = plainly(recipe, tmp_path)
    before, after = (read(tmp_path / name / "state") for name in ("before", "after"))
    held, again, crewed = asyncio.run(wide(recipe, tmp_path, cells, optimizer, tmp_path / "before" / "state"))
    found, kept = read(held), read(again)
    models = ["optimizer"] + (["critic"] if recipe.roles.critic.optimizer else [])
    for model in models:
        assert distance(before[model]["masters"], kept[model]["masters"]) == 0
        assert distance(before[model]["masters"], after[model]["masters"]) > 1e-6, "it has learned"
        assert distance(after[model]["masters"], found[model]["masters"]) < 1e-10
    assert distance(after["optimizer"]["masters"], gone_on_from(recipe, tmp_path, held)[0]) < 1e-10
    if "critic" in models:
        assert distance(after["critic"]["masters"], gone_on_from(recipe, tmp_path, held)[1]) < 1e-10
    watched = ["loss", "grad_norm", "tokens/trained", "reward/mean"]
    for name in [*watched, *("critic/loss", "critic/grad_norm", "critic/value")] if "critic" in models else watched:
        told = [[report[name] for report in each if name in report] for each in (crewed, reports)]
        assert told[0] == pytest.approx(told[1], rel=1e-9, abs=1e-15), name


def test_a_teacher_in_slices_teaches_what_it_does_as_a_whole(tmp_path):
    (beside := tmp_path / "teacher").mkdir()
    teacher = str(start(beside, run__steps=1, evaluate__every=0, model__scratch__width=32, seed=9).model)
    changes = {"model__dtype": "float64", "optimizer__lr": RATE, "roles__teacher": {"name": teacher}}
    recipe = recipe_in(tmp_path, algorithm={"name": "distill", "top_k": 3}, **changes)
    plainly(recipe, tmp_path)
    cells = [cell("generate", 0), cell("train", 0), cell("reference", 1, 2)]
    held, again, _ = asyncio.run(wide(recipe, tmp_path, cells, "replicated", tmp_path / "before" / "state"))
    found, before, after = (
        read(state)["optimizer"]["masters"] for state in (held, again, tmp_path / "after" / "state")
    )
    assert distance(before, after) > 1e-6, "it has learned"
    assert distance(after, found) < 1e-10
