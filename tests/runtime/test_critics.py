"""Runs that train a critic beside the policy: the same gradients whatever the plan, and nothing lost at a resume."""

import asyncio

import numpy as np
import pytest
import torch

from crewed import STEPS, Fragile, saved, steps, with_parts, with_sleep
from running import assert_same_run, lines, recipe_in, resume, start, tensors
from sequential import Sequential
from stretto.errors import RecipeError
from stretto.placement.build import plan_of
from stretto.recipe.describe import roles_of
from stretto.recipe.schema import Placement
from stretto.runtime.build import build_runtime
from stretto.runtime.plans import make_plan, sliced_cells
from stretto.runtime.spans import Clock
from stretto.workers.launchers import inprocess
from stretto.workers.launchers.inprocess import ThreadLauncher
from stretto.workers.worker import Worker
from tiers import slow_but

CPUS = ("localhost/cpu:0", "localhost/cpu:1")
RATE = 1e-4
"""Small, as Adam makes a gradient that is nothing but rounding as long as any other, times this."""

LORA = {"kind": "lora", "rank": 4, "alpha": 8}
FOUR = {
    "model__dtype": "float64",
    "optimizer__lr": RATE,
    "roles": {"critic": {"name": "scratch", "optimizer": {"lr": RATE}}, "reward_model": {"name": "scratch"}},
    "rewards": [{"name": "accuracy", "kind": "numeric"}, {"name": "quality", "kind": "model", "weight": 0.5}],
    "algorithm": {"name": "ppo", "kl": {"coef": 0.1, "where": "reward"}},
}
"""Actor, critic, reference and reward model."""

PLANS = {
    "flatten": {"strategy": "flatten"},
    "I1": {"strategy": "interleave", "fractions": "I1"},
    "I2": {"strategy": "interleave", "fractions": "I2"},
    "separate": {"strategy": "separate"},
    "elastic": {"strategy": "elastic"},
}


class Recording(Worker):
    """A worker that keeps the gradients of every update, by model."""

    def __init__(self, *assigned):
        super().__init__(*assigned)
        self.gradients = {model: [] for model in self.held_models}
        for model in self.held_models:
            if (optimizer := self.trained(model).optimizer) is not None:
                self.record(model, optimizer)

    def record(self, model, optimizer):
        step = optimizer.step

        def recorded(gradients):
            self.gradients[model].append({name: gradient.clone() for name, gradient in gradients.items()})
            return step(gradients)

        optimizer.step = recorded


async def plainly(recipe, folder):
    """Gradients and reports of the plain steps."""
    plain = Sequential(recipe, folder, make_worker=Recording)
    try:
        reports = [plain.learn((await plain.sampled()).samples, step=step) for step in range(1, STEPS + 1)]
        return plain.worker.gradients, reports
    finally:
        await plain.close()


async def on_cells(recipe, folder, *, devices=CPUS, change=None):
    """The same on workers, those of every worker that trains a model; and what a checkpoint holds in the end."""
    plan = plan_of(recipe.placement, roles=roles_of(recipe), devices=devices)
    made = []
    launcher = ThreadLauncher(lambda assignment: made.append(Recording(assignment)) or made[-1])
    parts = await build_runtime(
        recipe, plan=change(plan) if change else plan, root=folder, folder=folder, note=print, launcher=launcher
    )
    try:
        reports = await steps(parts, Clock(devices=parts.devices))
        state = await saved(parts.worker_group, folder)
        found = {
            model: [each.gradients[model] for each in made if each.gradients.get(model)]
            for model in ("policy", "critic")
        }
        return found, reports, state
    finally:
        await parts.close()


def assert_alike(one, other, close):
    """Gradients of the same updates, each relative to the norm of its whole update."""
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        whole = torch.stack([gradient.double().norm() for gradient in mine.values()]).norm()
        assert whole > 0
        for name, gradient in theirs.items():
            assert float((mine[name] - gradient).double().norm() / whole) < close, name


@pytest.mark.parametrize("dtype", slow_but("float64", of=["float64", "float32"]))
@pytest.mark.parametrize("plan", slow_but("I2", "elastic", of=list(PLANS)))
def test_gradients_of_actor_and_critic_are_those_of_one_device_under_every_strategy(plan, dtype, tmp_path):
    changes = FOUR | {"model__dtype": dtype, "placement": {"cluster": "2xcpu", **PLANS[plan]}}
    recipe = recipe_in(tmp_path, **changes)
    single, reports = asyncio.run(plainly(recipe_in(tmp_path, **FOUR | {"model__dtype": dtype}), tmp_path))
    found, crewed, _ = asyncio.run(on_cells(recipe, tmp_path))
    # In single precision later steps may sample other answers, so that only the first can be compared.
    compared, close = (STEPS, 1e-10) if dtype == "float64" else (1, 1e-5)
    for model in ("policy", "critic"):
        assert found[model]
        for gradients in found[model]:
            assert_alike(single[model][:compared], gradients[:compared], close)
    for name in ("loss", "critic/loss", "critic/grad_norm", "critic/value", "critic/return", "critic/tokens"):
        told = [[report[name] for report in each[:compared]] for each in (crewed, reports)]
        assert told[0] == pytest.approx(told[1], rel=10 * close, abs=close), name


@pytest.mark.parametrize(
    ("plan", "changes", "change"),
    [
        pytest.param("separate", {"batch__updates": 3}, None, marks=pytest.mark.slow),
        ("flatten", {"model__adapter": LORA, "roles__critic__adapter": dict(LORA)}, with_sleep),
        pytest.param("elastic", {"roles__critic__warmup_steps": 2}, with_parts, marks=pytest.mark.slow),
    ],
)
def test_several_updates_adapters_and_shared_optimizers_are_exact_with_a_critic(plan, changes, change, tmp_path):
    changes = FOUR | changes
    recipe = recipe_in(tmp_path, **changes, placement={"cluster": "2xcpu", **PLANS[plan]})
    single, reports = asyncio.run(plainly(recipe_in(tmp_path, **changes), tmp_path))
    found, crewed, _ = asyncio.run(on_cells(recipe, tmp_path, change=change))
    for model in ("policy", "critic"):
        for gradients in found[model]:
            assert_alike(single[model], gradients, 1e-10)
    for name in ("loss", "tokens/trained", "critic/loss", "critic/tokens"):
        assert [r[name] for r in crewed] == pytest.approx([r[name] for r in reports], rel=1e-9, abs=1e-15)


def test_a_critic_is_read_where_it_is_not_trained(tmp_path):
    """Values on one device, from weights that another one trains: handed over after every update."""
    cells = [
        {"role": "generate", "devices": [CPUS[0]]},
        {"role": "reward", "devices": [CPUS[0]]},
        {"role": "reference", "devices": [CPUS[1]]},
        {"role": "train", "devices": [CPUS[0]]},
        {"role": "value", "devices": [CPUS[0]]},
        {"role": "fit", "devices": [CPUS[1]]},
    ]
    recipe = recipe_in(tmp_path, **FOUR, placement={"cluster": "2xcpu", "cells": cells})
    single, _ = asyncio.run(plainly(recipe_in(tmp_path, **FOUR), tmp_path))
    found, *_ = asyncio.run(on_cells(recipe, tmp_path))
    assert [len(found[model]) for model in ("policy", "critic")] == [1, 1]
    assert_alike(single["critic"], found["critic"][0], 1e-10)
    assert_alike(single["policy"], found["policy"][0], 1e-10)


@pytest.mark.parametrize("devices", [[CPUS[0]], list(CPUS)[::-1]])
def test_a_device_that_has_a_slice_of_a_critic_does_not_say_its_values_alone(devices, tmp_path):
    cells = [{"role": role, "devices": [CPUS[0]]} for role in ("generate", "reward", "reference", "train")]
    cells += [{"role": "fit", "devices": list(CPUS)}, {"role": "value", "devices": devices}]
    placement = Placement(cluster="2xcpu", cells=tuple(cells))
    with pytest.raises(RecipeError, match=r"value needs all of a model that fit has|are named in two orders"):
        make_plan(recipe_in(tmp_path, **FOUR).model_copy(update={"placement": placement}))


def test_a_strategy_cuts_the_critic_like_the_policy(tmp_path):
    recipe = recipe_in(tmp_path, **FOUR, placement={"cluster": "2xcpu", "strategy": "elastic"})
    plan = make_plan(recipe, width=2)
    wide = {cell.role for cell in plan.cells if len(cell.devices) == 2}
    assert wide == {cell.role for cell in sliced_cells(recipe, plan)} == {"train", "fit", "value"}


PPO = {
    "roles": {"critic": {"name": "scratch", "optimizer": {"lr": 1e-3}, "warmup_steps": 1}},
    "algorithm": {"name": "ppo", "kl": {"coef": 0.1, "where": "reward", "adaptive": {"target": 0.01, "horizon": 100}}},
    "run__steps": 4,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps, the first of which trains the critic alone."""
    return start(tmp_path_factory.mktemp("whole"), **PPO).folder


def test_an_interrupted_run_goes_on_to_the_bit_with_its_critic(whole, tmp_path):
    class Killed(BaseException):
        pass

    def stop(name, *told):
        if name == "step" and told[0] == 3:
            raise Killed

    folder = tmp_path / "run0"
    with pytest.raises(Killed):
        start(tmp_path, at=stop, **PPO)
    resume(folder)
    assert_same_run(whole, folder, step=4)


def test_in_its_warm_up_a_critic_learns_alone(whole):
    rows = lines(whole / "metrics.jsonl")[1:]
    assert [row["tokens/trained"] > 0 for row in rows] == [False, True, True, True]
    assert all(row["critic/tokens"] > 0 and row["critic/grad_norm"] > 0 for row in rows)
    first, second = (tensors(whole / "checkpoints" / f"step-{step:06d}") for step in (1, 2))
    moved = {key[0] for key in first if not torch.equal(first[key], second[key])}
    assert {"state/critic_optimizer.safetensors", "model.safetensors"} <= moved
    assert rows[0]["critic/value"] == 0, "a critic begins by saying nothing"
    assert rows[1]["critic/value"] != 0


def test_the_coefficient_of_the_kl_moves_towards_its_target(whole):
    rows = lines(whole / "metrics.jsonl")[1:]
    coefs = [row["kl/coef"] for row in rows]
    expected = [0.1]
    for row in rows[:-1]:
        off = np.clip(row.get("kl/reference", 0.01) / 0.01 - 1, -0.2, 0.2)
        expected.append(expected[-1] * (1 + off * 12 / 100))
    assert coefs == pytest.approx(expected)
    assert coefs[0] == coefs[1] != coefs[2], "a step without a policy says nothing of its KL"


@pytest.mark.parametrize(
    ("device", "what", "number"),
    [
        ("localhost/cpu:1", "accumulate", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("localhost/cpu:0", "accumulate", 2),
                ("localhost/cpu:1", "begin", 2),
                ("localhost/cpu:0", "save", 2),
            )
        ),
    ],
)
def test_a_worker_that_dies_gets_the_critic_from_another(device, what, number, tmp_path, monkeypatch):
    """Its critic and its critic's optimizer too, or the next update would not be that of the other cell."""
    changes = PPO | {"model__dtype": "float64", "run__steps": 3, "evaluate__every": 0, "checkpoint__best": None}
    changes["placement"] = {"cluster": "2xcpu", "strategy": "flatten"}
    states = []
    for name, launcher in (("whole", ThreadLauncher()), ("hurt", Fragile(device, what, number))):
        monkeypatch.setattr(inprocess, "processes", lambda devices, launcher=launcher, **told: launcher)
        (tmp_path / name).mkdir()
        states.append(tensors(start(tmp_path / name, **changes).folder / "checkpoints" / "step-000003"))
    assert launcher.died == {device}
    assert states[0].keys() == states[1].keys()
    assert max(float((states[0][key].double() - states[1][key].double()).abs().max()) for key in states[0]) < 1e-8
