"""A publish that is skipped or spoilt on purpose is caught in the same step, whoever holds the policy."""

import asyncio
import os
import re
from pathlib import Path

import pytest

from crewed import STEPS, alone, distance, steps, together
from faulty import STEP, Drops, Flips, Forgets, Misnumbers, Silent, Skips, Sound, worker_with
from running import recipe_in
from stretto.errors import EngineError, WeightsError
from stretto.kernels.cpu import packed_linear
from stretto.placement.build import plan_of
from stretto.runtime.build import build_runtime
from stretto.runtime.spans import Clock
from stretto.workers.launchers.inprocess import ThreadLauncher
from stretto.workers.launchers.ray import RayLauncher
from stretto.workers.worker import Worker
from tiers import slow_but

ADAPTERS = [None, {"kind": "lora", "rank": 4, "alpha": 8}]
DEVICES = ["localhost/cpu:0", "localhost/cpu:1"]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["full", "lora"])
@pytest.mark.parametrize(
    ("faulty", "told"),
    [
        (Skips, r"localhost/cpu:0 \(generate, train\) samples from weights 1, the trainer published 2"),
        (Misnumbers, r"localhost/cpu:0 \(generate, train\) samples from weights 3, the trainer published 2"),
        (Flips, r"1 of \d+ tensors of localhost/cpu:0 differ from those of its optimizer \([\w.]+\)"),
        (Forgets, r"1 of \d+ tensors of localhost/cpu:0 differ from those of its optimizer \([\w.]+\)"),
    ],
)
def test_on_one_device(faulty, told, adapter, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="bfloat16", model__adapter=adapter)
    with pytest.raises(WeightsError, match=rf"after step {STEP}, {told}\n    fix: stretto resume"):
        asyncio.run(
            together(recipe, tmp_path, "flatten", devices=1, launcher=ThreadLauncher(worker_with(faulty, DEVICES[0])))
        )


def keeps_copies(assignment):
    """A worker whose engine never sees that a weight has changed, and keeps its copies in another order."""
    worker = Worker(assignment)
    worker.engine.steps.rest = worker.engine.steps.weights_changed = lambda: None
    return worker


def test_copies_of_older_weights_are_caught_where_nothing_is_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_linear, "stamp_of", lambda weights: ())
    worker_group = together(recipe_in(tmp_path), tmp_path, "flatten", devices=1, launcher=ThreadLauncher(keeps_copies))
    with pytest.raises(WeightsError, match=r"after step [12], \d+ of \d+ tensors of localhost/cpu:0 differ"):
        asyncio.run(worker_group)


class Spoils(Worker):
    """In its second step a bit of a copy that decode steps read becomes another."""

    def generate(self, new, unwanted, seconds):
        done = super().generate(new, unwanted, 0.0)
        if self.trainer.version == STEP - 1 and (copies := list(self.engine.steps.ordered.values())):
            packed_linear.memory_of(copies[-1].weight)[0] ^= 1
        return done


@pytest.mark.parametrize(
    ("adapter", "error", "told"),
    [
        (None, EngineError, "copies of weights in another order are not the weights any more\n    fix: stretto resume"),
        (ADAPTERS[1], (EngineError, WeightsError), "not the weights any more|differ from those of its optimizer"),
    ],
    ids=["full", "lora"],
)
def test_a_copy_that_is_spoilt_while_it_is_read_stops_the_run(adapter, error, told, tmp_path):
    recipe = recipe_in(tmp_path, model__adapter=adapter)
    with pytest.raises(error, match=told):
        asyncio.run(together(recipe, tmp_path, "flatten", devices=1, launcher=ThreadLauncher(Spoils)))


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["full", "lora"])
@pytest.mark.parametrize(
    ("faulty", "told"),
    [
        (Skips, "samples from weights 1, localhost/cpu:1 (train) published 2"),
        (Misnumbers, "samples from weights 3, localhost/cpu:1 (train) published 2"),
        (Silent, "differ from those of localhost/cpu:1 (train) ("),
        (Drops, "differ from those of localhost/cpu:1 (train) ("),
        (Flips, "differ from those of localhost/cpu:1 (train) ("),
    ],
)
def test_on_a_device_that_only_generates(faulty, told, adapter, tmp_path):
    recipe = recipe_in(tmp_path, model__adapter=adapter)
    workers = ThreadLauncher(worker_with(faulty, DEVICES[0]))
    with pytest.raises(WeightsError, match=rf"after step {STEP}, .*localhost/cpu:0 \(generate\).*{re.escape(told)}"):
        asyncio.run(together(recipe, tmp_path, "separate", launcher=workers))


@pytest.mark.parametrize("faulty", [Skips, Flips, Forgets, Misnumbers])
@pytest.mark.parametrize("device", slow_but(DEVICES[0], of=DEVICES))
def test_on_a_device_that_trains_beside_others(device, faulty, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="bfloat16")
    workers = ThreadLauncher(worker_with(faulty, device))
    with pytest.raises(WeightsError, match=rf"after step {STEP}, .*{device}"):
        asyncio.run(together(recipe, tmp_path, "flatten", launcher=workers))


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [Drops, Flips])  # the others are found in the same way, in threads above
def test_in_a_process_of_its_own(faulty, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{Path(__file__).parents[1]}")
    recipe = recipe_in(tmp_path)
    workers = RayLauncher(DEVICES, seconds=60, make=worker_with(faulty, DEVICES[0]))
    with pytest.raises(WeightsError, match=rf"after step {STEP}, .*localhost/cpu:0"):
        asyncio.run(together(recipe, tmp_path, "separate", launcher=workers))


def test_small_buckets_bring_the_same(tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64")
    single, _ = asyncio.run(alone(recipe, tmp_path))
    workers = ThreadLauncher(worker_with(Sound, DEVICES[0]))
    weights, *_ = asyncio.run(together(recipe, tmp_path, "separate", launcher=workers))
    assert distance(single, weights) < 1e-10


def other_base(assignment):
    """A worker of which one frozen number is another."""
    worker = Worker(assignment)
    if assignment.device == DEVICES[1]:
        worker.policy.network.get_input_embeddings().weight.data[0, 0] += 1
    return worker


def test_a_worker_with_another_base_model_never_begins(tmp_path):
    recipe = recipe_in(tmp_path, model__adapter=ADAPTERS[1])
    with pytest.raises(WeightsError, match=r"before the first step, 1 of .*localhost/cpu:1 .*embed_tokens"):
        asyncio.run(together(recipe, tmp_path, "elastic", launcher=ThreadLauncher(other_base)))


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["full", "lora"])
def test_a_device_that_only_generates_gets_the_weights_of_a_checkpoint(adapter, tmp_path):
    recipe = recipe_in(tmp_path, model__adapter=adapter)

    async def scenario():
        plan = plan_of(
            recipe.placement.model_copy(update={"strategy": "separate"}),
            roles={"generate", "train"},
            devices=tuple(DEVICES),
        )
        made = {"plan": plan, "root": tmp_path, "folder": tmp_path, "note": print}
        first = await build_runtime(recipe, launcher=ThreadLauncher(), **made)
        await steps(first, Clock())
        await first.worker_group.save(tmp_path / "saved")
        await first.close()
        second = await build_runtime(recipe, launcher=ThreadLauncher(), **made)
        await second.restored(tmp_path / "saved")
        trainers = second.worker_group.trainers
        receipts = await second.worker_group.all(
            DEVICES, lambda each: each.engine_weights(trainers, False, False), seconds=60
        )
        await second.close()
        return receipts

    generates, trains = asyncio.run(scenario())
    assert generates == trains
    assert generates.version == STEPS
