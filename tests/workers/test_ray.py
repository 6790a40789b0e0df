"""Workers in processes of their own: what dies is made again, and nothing is left behind."""

import asyncio
import os
import time
from pathlib import Path

import pytest
import ray

from crewed import Dying, alone, dies, distance, together, with_parts
from running import recipe_in
from stretto.errors import DeadlineError, TrainingError
from stretto.workers.launchers.ray import RayLauncher
from stretto.workers.orphans import marked
from stretto.workers.worker_spec import WorkerSpec

pytestmark = pytest.mark.slow

DEVICES = ["localhost/cpu:0", "localhost/cpu:1"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    made = recipe_in(folder, model__dtype="float64", algorithm__kl={"coef": 0.1, "estimator": "k2"})
    return made, folder, asyncio.run(alone(made, folder))[0]


class Deadly(RayLauncher):
    """Starts workers of which one device's are killed, one after the other: each at its second call of a kind, and at
    its first of score, of which one that was late to come back may get no other."""

    def __init__(self, device, *calls):
        super().__init__(DEVICES, seconds=60)
        self.device, self.calls, self.starts = device, calls, 0

    async def start(self, spec):
        member = await super().start(spec)
        if spec.device != self.device:
            return member
        self.starts += 1
        if self.starts > len(self.calls):
            return member
        call = self.calls[self.starts - 1]
        return Dying(member, call, 1 if call == "score" else 2)


@pytest.mark.parametrize(
    "calls",
    [("generate", "score"), ("loss_counters", "reduce"), ("apply", "engine_weights")],
    ids=" then ".join,
)
def test_a_worker_that_is_killed_is_made_again_and_the_steps_have_the_same_result(calls, recipe):
    made, folder, single = recipe
    launcher = Deadly(DEVICES[1], *calls)
    weights, reports, _ = asyncio.run(together(made, folder, "elastic", launcher=launcher))
    assert launcher.starts == 1 + len(calls)
    assert distance(single, weights) < 1e-8
    assert all(report["tokens/trained"] and report["learning_rate"] for report in reports)
    assert marked(launcher.reaper.mark) == []


@pytest.mark.parametrize("dead", [slice(0, 2)], ids=["the first two"])
def test_two_of_three_that_are_killed_at_once_come_back_one_after_the_other(dead, recipe):
    made, folder, single = recipe
    devices = [*DEVICES, "localhost/cpu:2"]

    def hurt(worker_group):
        for device in devices[dead]:
            dies(device, "reduce")(worker_group)

    launcher = RayLauncher(devices, seconds=60)
    worker_group = together(made, folder, "flatten", devices=3, launcher=launcher, hurt=hurt)
    weights, *_ = asyncio.run(worker_group)
    assert distance(single, weights) < 1e-8
    assert marked(launcher.reaper.mark) == []


def test_a_sampler_that_is_killed_while_it_takes_new_weights_gets_them_again(recipe):
    made, folder, single = recipe
    launcher = RayLauncher(DEVICES, seconds=60)
    worker_group = together(made, folder, "separate", launcher=launcher, hurt=dies(DEVICES[0], "fetch"))
    weights, reports, _ = asyncio.run(worker_group)
    assert distance(single, weights) < 1e-8
    assert all(report["tokens/trained"] and report["learning_rate"] for report in reports)
    assert marked(launcher.reaper.mark) == []


def test_a_reward_model_whose_process_is_killed_scores_again(tmp_path):
    rewards = [{"name": "accuracy", "kind": "numeric"}, {"name": "quality", "kind": "model"}]
    roles = {"reward_model": {"name": "scratch"}}
    made = recipe_in(tmp_path, model__dtype="float64", roles=roles, rewards=rewards)
    single, _ = asyncio.run(alone(made, tmp_path))
    launcher = RayLauncher(DEVICES, seconds=60)
    weights, *_ = asyncio.run(together(made, tmp_path, "flatten", launcher=launcher, hurt=dies(DEVICES[1], "score")))
    assert distance(single, weights) < 1e-8
    assert marked(launcher.reaper.mark) == []


def test_a_process_that_is_killed_takes_its_part_of_a_shared_optimizer_with_it(recipe):
    made, folder, _ = recipe
    launcher, hurt = RayLauncher(DEVICES, seconds=60), dies(DEVICES[1], "apply")
    with pytest.raises(TrainingError, match=f"{DEVICES[1]}: its process died, and its part of the optimizer with it"):
        asyncio.run(together(made, folder, "flatten", launcher=launcher, hurt=hurt, change=with_parts))
    assert marked(launcher.reaper.mark) == []


def test_a_worker_is_closed_before_its_process_ends_and_one_that_is_busy_is_not_waited_for(tmp_path):
    """What it keeps outside of its process, such as the memory of an engine, nobody else would put away."""

    class Slow:
        """Leaves a note when it is closed, and has a call that takes as long as it is asked to."""

        def __init__(self, assignment):
            self.note = assignment.root / assignment.device.replace("/", "-")

        def ready(self):
            return True

        def waits(self, seconds):
            time.sleep(seconds)

        def close(self):
            self.note.touch()

    async def scenario():
        launcher = RayLauncher(DEVICES, seconds=60, make=Slow)
        empty = {"recipe": None, "root": tmp_path, "base": None, "roles": frozenset(), "token_budget": 1}
        try:
            await launcher.open()
            idle, busy = [await launcher.start(WorkerSpec(device=device, **empty)) for device in DEVICES]
            await idle.call("ready")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(busy.call("waits", 300), 0.5)
            begun = time.monotonic()
            await asyncio.gather(idle.close(), busy.close())
            return time.monotonic() - begun
        finally:
            await launcher.close()

    assert asyncio.run(scenario()) < 20
    assert [path.name for path in tmp_path.iterdir()] == ["localhost-cpu:0"]


def test_a_process_sees_the_gpu_that_its_device_names(monkeypatch):
    """Ray believes in two GPUs, which nobody uses."""

    class Seeing:
        """Tells which GPU it would use."""

        def __init__(self, assignment):
            self.device = assignment.device

        def told(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    init = ray.init
    monkeypatch.setattr(ray, "init", lambda **told: init(**told, num_gpus=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")

    async def scenario():
        devices = ["localhost/gpu:1", "localhost/gpu:0"]
        launcher = RayLauncher(devices, seconds=60, make=Seeing)
        try:
            await launcher.open()
            empty = {"recipe": None, "root": Path(), "base": None, "roles": frozenset(), "token_budget": 1}
            members = [await launcher.start(WorkerSpec(device=device, **empty)) for device in devices]
            return [await member.call("told") for member in members]
        finally:
            await launcher.close()

    assert asyncio.run(scenario()) == ["7", "5"]


def test_a_cluster_that_is_too_small_is_told_with_what_it_lacks(monkeypatch):
    init = ray.init
    monkeypatch.setattr(ray, "init", lambda **told: init(**told | {"num_cpus": 1}))

    async def scenario():
        launcher = RayLauncher(DEVICES, seconds=1)
        try:
            await launcher.open()
        finally:
            await launcher.close()

    with pytest.raises(DeadlineError, match=r"within 1 s: needs a host at .* with 2 CPU, sees 1\n    fix: add nodes"):
        asyncio.run(scenario())
