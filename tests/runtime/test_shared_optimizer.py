"""Training cells that share one optimizer, in threads of this process: weights and checkpoints of one device."""

import asyncio
import math

import pytest
import torch

from crewed import STAGES, STEPS, alone, distance, read, steps, together, with_parts, with_sleep
from faulty import Drops, Flips, Forgets, Misnumbers, Skips, Sound, worker_with
from running import recipe_in
from sleepy import Sleepy
from stretto.errors import TrainingError, WeightsError, WorkerLost
from stretto.placement.build import plan_of
from stretto.recipe.describe import roles_of
from stretto.runtime.build import build_runtime
from stretto.runtime.plans import make_plan
from stretto.runtime.spans import Clock
from stretto.workers import shared_folder
from stretto.workers.launchers.inprocess import ThreadLauncher
from stretto.workers.worker import Worker
from tiers import slow_but

LORA = {"kind": "lora", "rank": 4, "alpha": 8}
DEVICES = ["localhost/cpu:0", "localhost/cpu:1"]
CLIP = {"optimizer__clip": 0.001}
"""Far below the norm of these gradients, so that every update is scaled by it."""


@pytest.mark.parametrize(
    ("strategy", "devices", "adapter"),
    [
        ("flatten", 2, LORA),
        ("elastic", 3, None),
        ("separate", 4, None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("interleave", 2, None), ("separate", 2, LORA), ("separate", 4, LORA), ("elastic", 3, LORA)]
        ),
    ],
)
def test_they_end_with_the_weights_of_one_device(strategy, devices, adapter, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", model__adapter=adapter, **CLIP)
    single, reports = asyncio.run(alone(recipe, tmp_path))
    worker_group = together(recipe, tmp_path, strategy, devices=devices, change=with_parts)
    weights, crewed, _ = asyncio.run(worker_group)
    assert list(weights) == list(single), "the parts are put together in the order of one device"
    assert distance(single, weights) < 1e-10
    assert sum(report["grad_norm"] > 2 * recipe.optimizer.clip for report in reports) > 1
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [report[name] for report in crewed] == pytest.approx([report[name] for report in reports], rel=1e-9)


def test_a_cell_that_was_dealt_nothing_takes_part(tmp_path):
    adapter = LORA | {"targets": ["q_proj"]}
    recipe = recipe_in(tmp_path, model__dtype="float64", model__adapter=adapter)
    single, _ = asyncio.run(alone(recipe, tmp_path))
    assert len(single) == 2
    weights, *_ = asyncio.run(together(recipe, tmp_path, "flatten", devices=3, change=with_parts))
    assert distance(single, weights) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_each_holds_about_its_share_of_masters_and_moments(name, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="bfloat16", model__scratch__layers=6, optimizer__name=name)
    held = {}
    for devices in (1, 2, 4):
        members = []

        def keep(worker_group, members=members):
            members += worker_group.members.values()

        asyncio.run(together(recipe, tmp_path, "flatten", devices=devices, hurt=keep, change=with_parts))
        optimizers = [member.made.result().optimizer for member in members]
        held[devices] = [sum(tensor.nbytes for tensor in optimizer.tensors()) for optimizer in optimizers]
    whole = sum(weight.numel() for weight in optimizers[0].parameters.values())
    assert held[1][0] > 6 * whole
    for devices in (2, 4):
        # Each tensor brings some numbers of its own, such as how often it was updated.
        assert sum(held[devices]) == pytest.approx(held[1][0], rel=0.01)
        assert max(held[devices]) < 1.2 * held[1][0] / devices


class Poisoned(Worker):
    """A worker whose second gradient is not finite."""

    def reduce(self, model, sums):
        if self.trainer.version == 1 and self.assignment.device == DEVICES[1]:
            poison = {name: torch.full_like(weight, math.inf) for name, weight in self.trainer.trained.items()}
            self.trainer.accumulators = dict.fromkeys(self.trainer.terms_by_denominator, poison)
        super().reduce(model, sums)


def test_an_update_that_is_not_finite_is_skipped_by_all_of_them(tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", guards__non_finite="skip")
    found = []
    for change in (None, with_parts):
        worker_group = together(recipe, tmp_path, "flatten", launcher=ThreadLauncher(Poisoned), change=change)
        weights, reports, _ = asyncio.run(worker_group)
        assert [report["updates/skipped"] for report in reports] == [0, 1, 0]
        found.append(weights)
    assert distance(*found) < 1e-10


def test_an_update_that_is_not_finite_stops_the_run_if_that_is_not_said(tmp_path):
    with pytest.raises(TrainingError, match="step 2 is not finite"):
        asyncio.run(together(recipe_in(tmp_path), tmp_path, "flatten", launcher=ThreadLauncher(Poisoned)))


def test_models_sleep_beside_their_parts(tmp_path):
    recipe = recipe_in(tmp_path, **STAGES | {"model__dtype": "float64"})
    single, _ = asyncio.run(alone(recipe, tmp_path))
    worker_group = together(
        recipe, tmp_path, "flatten", launcher=ThreadLauncher(Sleepy), change=lambda plan: with_sleep(with_parts(plan))
    )
    weights, *_ = asyncio.run(worker_group)
    assert distance(single, weights) < 1e-10


# Checkpoints ----------------------------------------------------------------------------------------------------------


class Elsewhere(Worker):
    """On a host that does not have the driver's folders."""

    def save(self, model, folder, there, part, of, exports, base):
        super().save(model, folder, {}, part, of, exports, base)

    def restore(self, folder, there):
        return folder is None and super().restore(folder, there)


async def crew_of(recipe, folder, devices, change, make=Worker):
    """Workers with the optimizer shared, or not."""
    names = tuple(f"localhost/cpu:{index}" for index in range(devices))
    section = recipe.placement.model_copy(update={"strategy": "flatten"})
    plan = change(plan_of(section, roles=roles_of(recipe), devices=names))
    launcher = ThreadLauncher(make)
    return await build_runtime(recipe, plan=plan, root=folder, folder=folder, note=print, launcher=launcher)


async def on_one(recipe, folder):
    """One device."""
    return await build_runtime(recipe, plan=make_plan(recipe), root=folder, folder=folder, note=print)


PLACES = {
    "one device": on_one,
    "two copies": lambda recipe, folder: crew_of(recipe, folder, 2, lambda plan: plan),
    "two parts": lambda recipe, folder: crew_of(recipe, folder, 2, with_parts),
    "two parts elsewhere": lambda recipe, folder: crew_of(recipe, folder, 2, with_parts, Elsewhere),
    "three parts": lambda recipe, folder: crew_of(recipe, folder, 3, with_parts),
}


async def gone_on(recipe, folder, *places):
    """The state after some steps in each of these places, one after the other."""
    states, kept = None, None
    for number, place in enumerate(places):
        parts = await PLACES[place](recipe, folder)
        try:
            for part in parts.stateful if states else ():
                part.restore(states[part.name])
            await steps(parts, Clock(), kept)
            kept = folder / f"after-{number}"
            await parts.worker_group.files.save(kept)
            states = {part.name: part.state() for part in parts.stateful}
        finally:
            await parts.close()
    return read(kept / "state")


@pytest.mark.parametrize(
    ("places", "adapter"),
    [
        (("three parts", "two copies"), LORA),
        (("one device", "two parts"), None),
        (("two parts elsewhere", "two parts elsewhere"), LORA),
        pytest.param(("two parts", "three parts"), None, marks=pytest.mark.slow),
        pytest.param(("two parts elsewhere", "two parts elsewhere"), None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_goes_on_under_another_plan(places, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folder, "PIECE", 1000)
    recipe = recipe_in(tmp_path, model__dtype="float64", model__adapter=adapter, run__steps=2 * STEPS)
    single = asyncio.run(gone_on(recipe, tmp_path, "one device", "one device"))["optimizer"]
    other = asyncio.run(gone_on(recipe, tmp_path, *places))["optimizer"]
    assert list(tmp_path.glob("after-*/*.safetensors"))
    assert other["update"] == single["update"] == 2 * STEPS
    assert list(other["masters"]) == list(single["masters"]) == list(other["moments"])
    assert distance(single["masters"], other["masters"]) < 1e-10
    for key in ("exp_avg", "exp_avg_sq"):
        ours, theirs = ({name: each[key] for name, each in one["moments"].items()} for one in (other, single))
        assert distance(ours, theirs) < 1e-10


# Proofs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faulty", [Skips, Drops, Flips, Forgets, Misnumbers])
@pytest.mark.parametrize("device", slow_but(DEVICES[0], of=DEVICES))
def test_what_is_handed_round_wrongly_is_caught(device, faulty, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="bfloat16")
    workers = ThreadLauncher(worker_with(faulty, device))
    with pytest.raises(WeightsError, match=rf"after step [12], .*{device}"):
        asyncio.run(together(recipe, tmp_path, "flatten", launcher=workers, change=with_parts))


class Spoils(Sound):
    """Hands round what its optimizer did not make, so that all hold the same."""

    def bring(self, tensors, hand_round):
        with torch.no_grad():
            next(iter(tensors.values())).view(-1)[0] += 1
        super().bring(tensors, hand_round)


@pytest.mark.parametrize("device", DEVICES)
def test_who_hands_round_holds_it_against_its_own_masters(device, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="bfloat16")
    workers = ThreadLauncher(worker_with(Spoils, device))
    told = rf"after step 1, 1 of \d+ tensors of {device} differ from those of its optimizer"
    with pytest.raises(WeightsError, match=told):
        asyncio.run(together(recipe, tmp_path, "flatten", launcher=workers, change=with_parts))


# A process that dies --------------------------------------------------------------------------------------------------


class Lost:
    """A member that is gone at its second round of decoding."""

    def __init__(self, member, device):
        self.member, self.device, self.rounds = member, device, 0

    async def call(self, what, *arguments):
        self.rounds += what == "generate"
        if self.rounds == 2:
            raise WorkerLost(self.device, "its process has died")
        return await self.member.call(what, *arguments)

    async def close(self):
        await self.member.close()


def lost(device):
    """Loses one."""

    def hurt(worker_group):
        worker_group.members[device] = Lost(worker_group.members[device], device)

    return hurt


def test_a_cell_that_dies_takes_its_part_with_it(tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64")
    told = f"{DEVICES[1]}: its process died, and its part of the optimizer with it; resume the run"
    with pytest.raises(TrainingError, match=told):
        asyncio.run(together(recipe, tmp_path, "elastic", hurt=lost(DEVICES[1]), change=with_parts))


def test_a_device_that_only_generates_is_replaced_from_all_parts(tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64")
    single, _ = asyncio.run(alone(recipe, tmp_path))
    hurt = lost(DEVICES[0])
    weights, *_ = asyncio.run(together(recipe, tmp_path, "separate", devices=4, hurt=hurt, change=with_parts))
    assert distance(single, weights) < 1e-10
