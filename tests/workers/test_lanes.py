"""Cells of several devices that generate, each device a process: the weights of one device, and deaths by name."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest

from crewed import alone, dies, distance, read, steps
from families import mixture_in
from running import recipe_in
from stretto.errors import DeadlineError
from stretto.placement.build import plan_of
from stretto.recipe.describe import roles_of
from stretto.runtime.build import build_runtime
from stretto.runtime.spans import Clock
from stretto.workers.launchers.inprocess import processes, worker_of

pytestmark = pytest.mark.slow

LORA = {"kind": "lora", "rank": 3, "alpha": 4}
LANE = {"mesh": {"tp": 2}}


def cell(role, *devices, **more):
    return {"role": role, "devices": [f"localhost/cpu:{device}" for device in devices], **more}


APART = [cell("generate", 0, 1, **LANE), cell("train", 2)]
SLICED = [cell("generate", 0, 1, **LANE), cell("train", 2, 3)]
SAME = [cell("generate", 0, 1, **LANE), cell("train", 0, 1)]
SHARED = [cell("generate", 0, 1, **LANE), cell("train", 0, 1, **LANE)]
BESIDE = [cell("generate", 0, 1, **LANE), cell("generate", 2), cell("train", 2)]
PAIRS = [cell("generate", 0, 1, **LANE), cell("train", 2), cell("train", 3)]
TEAMS = [cell("generate", 0, 1, mesh={"ep": 2}), cell("train", 2)]


def die_together(*devices):
    """Kills the processes of some devices at once, in the second round of the first one's lane."""

    def hurt(worker_group):
        member = worker_group.members[devices[0]]
        call, left = member.call, [2]

        async def killed(what, *arguments):
            left[0] -= what == "generate"
            if left[0] == 0:
                for device in devices:
                    os.kill(worker_group.members[device].process, signal.SIGKILL)
            return await call(what, *arguments)

        member.call = killed

    return hurt


async def in_lanes(recipe, folder, cells, hurt=None):
    """State and reports of some steps on these cells; `hurt` may do things to the workers before."""
    placement = recipe.placement.model_copy(update={"cells": tuple(cells), "strategy": "elastic"})
    names = sorted({device for each in cells for device in each["devices"]})
    plan = plan_of(placement, roles=roles_of(recipe), devices=names)
    launcher = processes(names, seconds=300, make=worker_of)
    parts = await build_runtime(recipe, plan=plan, root=folder, folder=folder, note=print, launcher=launcher)
    try:
        if hurt:
            hurt(parts.worker_group)
        reports = await steps(parts, Clock(devices=parts.devices))
        await parts.worker_group.files.save(folder / "saved")
        return read(folder / "saved" / "state")["optimizer"]["masters"], reports
    finally:
        await parts.close()


@pytest.mark.parametrize(
    ("cells", "hurt", "changes"),
    [
        (SLICED, None, {}),
        (SAME, None, {"model__adapter": LORA, "model__quantize": "int8"}),
        (SHARED, None, {}),
        (BESIDE, dies("localhost/cpu:0", "generate"), {"model__adapter": LORA}),
        (PAIRS, die_together("localhost/cpu:1", "localhost/cpu:2"), {}),
    ],
    ids=[
        "two train slices",
        "the same two train slices of an adapter on eight bits",
        "the same two share matrices at both",
        "the first dies, beside a lane of one",
        "one dies together with one that trains",
    ],
)
def test_a_lane_of_two_devices_ends_with_the_weights_of_one(cells, hurt, changes, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", **changes)
    single, reports = asyncio.run(alone(recipe, tmp_path))
    masters, crewed = asyncio.run(in_lanes(recipe, tmp_path, cells, hurt))
    assert distance(single, masters) < 1e-10
    for name in ("loss", "grad_norm", "tokens/trained"):
        assert [report[name] for report in crewed] == pytest.approx([report[name] for report in reports], rel=1e-9)


def test_teams_that_share_experts_end_with_the_weights_of_one_device(tmp_path):
    mixture_in(tmp_path / "mixture")
    recipe = recipe_in(tmp_path, model={"name": "mixture", "dtype": "float32"}, optimizer__lr=1e-3)
    single, reports = asyncio.run(alone(recipe, tmp_path))
    masters, crewed = asyncio.run(in_lanes(recipe, tmp_path, TEAMS, dies("localhost/cpu:1", "generate")))
    assert distance(single, masters) < 1e-5
    for name in ("loss", "grad_norm", "tokens/trained"):
        assert [report[name] for report in crewed] == pytest.approx(
            [report[name] for report in reports], rel=1e-4, abs=1e-6
        )


def stops(device, number=2):
    """Stops the process of a device at its so manieth round of generating."""

    def hurt(worker_group):
        worker_group.patience = replace(worker_group.patience, generate=6.0)
        worker_group.lanes = worker_group.lane_calls.queues()
        member = worker_group.members[device]
        call, left = member.call, [number]

        async def stopped(what, *arguments):
            left[0] -= what == "generate"
            if left[0] == 0:
                os.kill(member.process, signal.SIGSTOP)
            return await call(what, *arguments)

        member.call = stopped

    return hurt


def test_a_process_of_a_lane_that_hangs_ends_the_run_with_the_lane_and_where_all_stand(tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64")
    with pytest.raises(DeadlineError) as caught:
        asyncio.run(in_lanes(recipe, tmp_path, APART, stops("localhost/cpu:1")))
    told = str(caught.value)
    assert "generate has not answered for 6 s" in told
    assert "localhost/cpu:1" in told
