"""Where one device is, it is the one that the plan names; how many processes judge follows from the cores there are."""

import asyncio

import pytest
import torch

from running import recipe_in
from stretto.runtime import build, cpu_threads
from stretto.runtime.plans import make_plan
from stretto.workers.worker_spec import torch_device


@pytest.mark.parametrize(
    ("name", "device"), [("localhost/cpu:3", "cpu"), ("localhost/gpu:0", "cuda:0"), ("host1/gpu:6", "cuda:2")]
)
def test_a_device_of_a_plan_is_one_of_this_process(name, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert torch_device(name) == torch.device(device)


def test_a_run_on_one_device_is_on_that_of_its_plan(tmp_path, monkeypatch):
    asked, cpu = [], torch.device("cpu")
    monkeypatch.setattr(build, "torch_device", lambda name: asked.append(name) or cpu)
    cells = [{"role": role, "devices": ["localhost/cpu:1"]} for role in ("generate", "train")]
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    recipe = recipe_in(tmp_path, placement={"cells": cells})

    async def started():
        made = await build.build_runtime(recipe, plan=make_plan(recipe), root=tmp_path, folder=None, note=print)
        await made.close()
        return list(made.worker_group.device.values())

    assert asyncio.run(started()) == 2 * ["localhost/cpu:1"]
    assert asked == ["localhost/cpu:1"]


def test_devices_that_have_slices_of_a_model_divide_its_rows_by_one_budget(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    here = [f"localhost/cpu:{index}" for index in range(3)]
    cells = [
        {"role": "generate", "devices": here[2:], "token_budget": 500},
        {"role": "reference", "devices": here[:1], "token_budget": 300},
        {"role": "train", "devices": here[:2], "token_budget": 100},
    ]
    recipe = recipe_in(tmp_path, placement={"cells": cells}, algorithm__kl={"coef": 0.1})
    assert build.budgets_of(make_plan(recipe), recipe) == dict(zip(here, (100, 100, 500), strict=True))


@pytest.mark.parametrize(("cores", "judges", "programs"), [(1, 4, 2), (2, 4, 2), (12, 6, 6), (128, 16, 16)])
def test_half_of_the_cores_judge_unless_the_recipe_says_how_many(cores, judges, programs, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_threads, "cores", lambda: cores)
    asked, told = recipe_in(tmp_path), recipe_in(tmp_path, run__reward_workers=5)
    assert (cpu_threads.reward_worker_count(asked), cpu_threads.program_count(asked)) == (judges, programs)
    assert (cpu_threads.reward_worker_count(told), cpu_threads.program_count(told)) == (5, 5)
