"""Models that leave the device to others while these work: who moves when, and that no result shows it.

On a CPU nothing would move, so what sleeps goes to a buffer that leaves empty tensors behind: whoever touches one of
them fails.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from crewed import STAGES, alone, dies, distance, read, steps, together, with_sleep
from running import metrics, recipe_in, resume, start, tensors
from sleepy import Hidden, Sleepy
from stretto.engines.base import Request
from stretto.engines.native.admission import CACHE_SHARE
from stretto.errors import TrainingError
from stretto.runtime.build import build_runtime
from stretto.runtime.plans import make_plan
from stretto.runtime.spans import Clock
from stretto.workers.api import POLICY
from stretto.workers.launchers.inprocess import ThreadLauncher, processes
from stretto.workers.offload import PUBLISH, HeldTensors, HostBuffer, Offloader
from stretto.workers.worker import Worker
from stretto.workers.worker_spec import WorkerSpec
from tiers import slow_but
from tiny import CPU, conversation

LORA = {"kind": "lora", "rank": 3, "alpha": 4}


class Noted:
    """A part that tells what happens to it."""

    def __init__(self, name, *read_by):
        self.name, self.read_by, self.told = name, frozenset(read_by), []
        self.woken_by = self.read_by

    def sleep(self):
        self.told.append("sleeps")

    def wake(self):
        self.told.append("wakes")


def entered(sleeps, parts, *phases):
    """What parts were told, phase by phase."""
    sleepers, told = Offloader(sleeps, parts), []
    for phase in phases:
        sleepers.enter(phase)
        told.append({part.name: part.told[0] for part in parts if part.told})
        for part in parts:
            part.told.clear()
    return told


def test_a_model_comes_back_when_its_own_stage_begins_and_not_before():
    judge, sleeps = Noted("judge", "reward"), {"reward": ["generate"], "train": [], "generate": []}
    told = entered(sleeps, [judge], "generate", "train", "train", "reward", "train")
    assert told == [{"judge": "sleeps"}, {}, {}, {"judge": "wakes"}, {}]


def test_what_several_roles_read_sleeps_where_all_of_them_may():
    policy = Noted("policy", "generate", "train")
    told = entered({"generate": ["reward", "value"], "train": ["reward"]}, [policy], "reward", "value", "train")
    assert told == [{"policy": "sleeps"}, {}, {"policy": "wakes"}]


def test_who_generates_and_who_trains_is_awake_when_weights_are_handed_over():
    parts = [Noted("cache", "generate"), Noted("optimizer", "train"), Noted("judge", "reward")]
    sleeps = {"generate": ["train"], "train": ["generate"], "reward": ["train"]}
    assert entered(sleeps, parts, PUBLISH) == [{"cache": "wakes", "optimizer": "wakes", "judge": "sleeps"}]


def test_without_cells_that_sleep_nobody_is_told_anything():
    assert entered({"reward": (), "train": ()}, [Noted("judge", "reward")], "train", "reward", PUBLISH) == [{}, {}, {}]


@pytest.mark.parametrize(("frozen", "copies"), [(True, 1), (False, 2)])
def test_what_never_changes_is_copied_once(frozen, copies):
    weight, host_buffer = nn.Parameter(torch.arange(4.0)), Hidden()
    part = HeldTensors({"train"}, lambda: [weight, weight], host_buffer, frozen=frozen)
    for _ in range(2):
        part.sleep()
        part.sleep()
        assert weight.numel() == 0
        part.wake()
        part.wake()
        assert weight.tolist() == [0, 1, 2, 3]
    assert host_buffer.numbers == 4 * copies


def test_what_changed_while_it_was_awake_comes_back_changed_and_keeps_its_hooks():
    weight, seen = nn.Parameter(torch.ones(2)), []
    weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.tolist()))
    part = HeldTensors({"train"}, lambda: [weight], Hidden(), frozen=False)
    for factor in (2, 3):
        part.sleep()
        part.wake()
        weight.grad = None
        (factor * weight).sum().backward()
        with torch.no_grad():
            weight.mul_(factor)
    assert seen == [[2, 2], [3, 3]]
    assert weight.tolist() == [6, 6]


def test_what_lies_in_host_memory_stays_there():
    weight = nn.Parameter(torch.ones(2))
    assert HostBuffer(CPU).put([weight])[0] is weight
    elsewhere = HeldTensors({"train"}, lambda: [weight], Hidden(torch.device("meta")), frozen=False)
    elsewhere.sleep()
    assert elsewhere.away == []


def test_memory_that_is_too_small_for_a_move_is_told():
    class Full(HostBuffer):
        def put(self, tensors):
            raise MemoryError

    parts = [HeldTensors({"train"}, lambda: [torch.ones(2)], Full(CPU), frozen=False)]
    with pytest.raises(TrainingError, match=r"reward: .* too little memory .* \(sleeps in placement.cells\)"):
        Offloader({"train": ["reward"]}, parts).enter("reward")


@pytest.mark.parametrize("dtype", slow_but("bfloat16", of=["float32", "bfloat16"]))
@pytest.mark.parametrize("changes", [STAGES, {**STAGES, "model__adapter": LORA}, {"batch__updates": 2}])
def test_sleep_changes_no_bit_on_one_device(changes, dtype, tmp_path):
    recipe, workers = recipe_in(tmp_path, model__dtype=dtype, **changes), []
    plain, reports, _ = asyncio.run(together(recipe, tmp_path, "flatten", devices=1))
    launcher = ThreadLauncher(lambda assignment: workers.append(Sleepy(assignment)) or workers[0])
    worker_group = together(recipe, tmp_path, "flatten", devices=1, launcher=launcher, change=with_sleep)
    slept, others, _ = asyncio.run(worker_group)
    assert workers[0].sleepers.parts[0].host_buffer.numbers > 0
    assert distance(plain, slept) == 0
    assert reports == others


@pytest.mark.parametrize(
    "changes",
    [pytest.param({"model__adapter": None}, marks=pytest.mark.slow), {"model__adapter": LORA}],
    ids=["full", "lora"],
)
@pytest.mark.parametrize(
    ("strategy", "devices"), [("interleave", 4), pytest.param("flatten", 2, marks=pytest.mark.slow)]
)
def test_sleep_changes_nothing_on_several_devices(strategy, devices, changes, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", **STAGES, **changes)
    single, reports = asyncio.run(alone(recipe, tmp_path))
    worker_group = together(
        recipe, tmp_path, strategy, devices=devices, launcher=ThreadLauncher(Sleepy), change=with_sleep
    )
    weights, crewed, _ = asyncio.run(worker_group)
    assert distance(single, weights) < 1e-10
    for name in ("loss", "grad_norm", "tokens/trained"):
        assert [report[name] for report in crewed] == pytest.approx([report[name] for report in reports], rel=1e-9)


AWAKE = []
"""(tensors of an optimizer, numbers of them that are awake) whenever its worker has generated or accumulated."""


class SeenWhileItTrains(Sleepy):
    """A worker that notes how much of its optimizer is awake, from the first time that it generates in a step.

    Nothing sends it back before that: a device that came too late for answers, and only trains, keeps it awake.
    """

    generated = False

    def generate(self, *arguments):
        found = super().generate(*arguments)
        self.generated = True
        self.note()
        return found

    def apply(self, model, last):
        self.generated = self.generated and model != POLICY
        return super().apply(model, last)

    def accumulate(self, *arguments):
        found = super().accumulate(*arguments)
        self.note()
        return found

    def note(self):
        if not self.generated:
            return
        held = [each for each in self.optimizer.tensors() if each.dim()]
        AWAKE.append((len(held), sum(each.numel() for each in held)))


def optimizer_asleep(plan):
    """The plan in which optimizers leave their memory to what generates."""
    cells = (replace(cell, sleeps=("generate",)) if cell.role == "train" else cell for cell in plan.cells)
    return replace(plan, cells=tuple(cells))


@pytest.mark.parametrize(
    "changes", slow_but({"batch__updates": 2}, of=[STAGES, {"model__adapter": LORA}, {"batch__updates": 2}])
)
def test_an_optimizer_that_sleeps_until_its_update_changes_nothing_where_stages_flow(changes, tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", **changes)
    single, _ = asyncio.run(alone(recipe, tmp_path))
    AWAKE.clear()
    launcher = ThreadLauncher(SeenWhileItTrains)
    weights, *_ = asyncio.run(together(recipe, tmp_path, "elastic", launcher=launcher, change=optimizer_asleep))
    assert distance(single, weights) < 1e-10
    assert any(count for count, _ in AWAKE), "moments are there after the first update"
    if "batch__updates" not in changes:
        assert {numbers for _, numbers in AWAKE} == {0}, "and sleep until the next"


def placed(plan):
    """Generating and a critic on one device, everything else on the other, and all of it sleeps."""
    one, two = plan.devices
    on = {"generate": one, "value": one}
    cells = {each.role: replace(each, devices=(on.get(each.role, two),), weights="own") for each in plan.cells}
    priority = {d: tuple(c.name for c in cells.values() if d in c.devices) for d in plan.devices}
    return with_sleep(replace(plan, cells=tuple(cells.values()), priority=priority))


def test_weights_are_handed_to_a_policy_that_made_room_for_a_critic(tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="float64", **STAGES)
    single, _ = asyncio.run(alone(recipe, tmp_path))
    worker_group = together(recipe, tmp_path, "flatten", launcher=ThreadLauncher(Sleepy), change=placed)
    weights, *_ = asyncio.run(worker_group)
    assert distance(single, weights) < 1e-10


def assigned(recipe, root, device, roles, **rest):
    """What a process of a device is told to be."""
    return WorkerSpec(
        recipe=recipe, root=root, base=None, device=device, roles=frozenset(roles), token_budget=64, **rest
    )


class LoadsLast(Sleepy):
    """A worker that notes what of its reward model was awake when its policy was loaded."""

    def _load(self, device):
        self.awake = sum(weight.numel() for weight in self.models["reward"].parameters())
        return super()._load(device)


def test_a_worker_answers_again_after_its_policy_made_room_for_a_reward_model(tmp_path):
    recipe, roles = recipe_in(tmp_path, **STAGES), ("generate", "reward", "train")
    asked = [Request(key=1, tokens=np.array([5, 6, 7]), max_new_tokens=4, stop=frozenset(), temperature=1.0)]
    said = []
    for sleeps in ({}, {role: tuple(other for other in roles if other != role) for role in roles}):
        worker = LoadsLast(assigned(recipe, tmp_path, "localhost/cpu:0", roles, sleeps=sleeps))
        assert (worker.awake == 0) == bool(sleeps), "what sleeps at times leaves its room to what is loaded next"
        first = worker.score("reward", [conversation([5, 6, 0], [2])])
        asleep = worker.policy.head().weight.numel() == 0
        (done,) = worker.generate(asked, (), 60.0)
        (more,) = worker.score("reward", [conversation(done.tokens.tolist(), [0])])
        said.append((first[0].tolist(), done.tokens.tolist(), more.tolist()))
        assert asleep == bool(sleeps)
        worker.close()
    assert said[0] == said[1]


class Holding:
    """An engine that tells how it is asked for its memory."""

    def __init__(self):
        self.told = []

    def sleep(self, keep):
        self.told.append(("sleep", keep))

    def wake(self):
        self.told.append("wake")

    def close(self):
        pass


def test_a_trainer_that_lacks_memory_gets_what_the_engine_of_its_process_holds(tmp_path):
    made = assigned(recipe_in(tmp_path), tmp_path, "localhost/cpu:0", ("generate", "train"))
    worker = Worker(made, lambda policy: Holding())
    worker.trainer.make_room()
    assert worker.engine.told == [("sleep", True), "wake"]
    worker.close()


def test_an_engine_has_the_cache_that_the_plan_says_unless_the_recipe_does(tmp_path):
    found = []
    for told, share in ((None, 0.1), (None, None), (0.2, 0.1)):
        changes = {} if told is None else {"engine__memory_share": told}
        made = recipe_in(tmp_path, **changes)
        worker = Worker(assigned(made, tmp_path, "localhost/cpu:0", ("generate", "train"), memory_share=share))
        found.append(worker.engine.kv_tokens)
        worker.close()
    shares = [CACHE_SHARE * tokens / found[1] for tokens in found]
    assert shares == pytest.approx([0.1, CACHE_SHARE, 0.2], rel=1e-4)


@pytest.mark.parametrize(
    ("roles", "sliced", "adapter", "read"),
    [
        ({"generate", "train"}, (), None, {"generate", "train"}),
        ({"reference", "train"}, ("train",), None, set()),
        ({"reference", "reward"}, (), None, set()),
        ({"reference", "reward"}, (), LORA, {"reference"}),
    ],
)
def test_a_policy_that_nothing_on_a_device_reads_stays_in_host_memory(roles, sliced, adapter, read, tmp_path):
    recipe = recipe_in(tmp_path, model__adapter=adapter)
    made = assigned(recipe, tmp_path, "host0/gpu:0", roles)
    made = replace(made, slices=dict.fromkeys(sliced, ("host0/gpu:0", "host0/gpu:1")))
    assert made.readers == read
    assert read or made.serving_device == CPU


def test_a_checkpoint_that_is_written_while_the_optimizer_sleeps_has_all_of_it(tmp_path):
    recipe = recipe_in(tmp_path, model__dtype="bfloat16", **STAGES)

    async def stated(plan, folder, before=None):
        """What a checkpoint after some steps and an evaluation holds."""
        workers, made = [], {"root": tmp_path, "folder": tmp_path, "note": print}
        launcher = ThreadLauncher(lambda assignment: workers.append(Sleepy(assignment)) or workers[0])
        parts = await build_runtime(recipe, plan=plan, launcher=launcher, **made)
        try:
            await steps(parts, Clock(), before)
            (worker,) = workers
            worker.sleepers.enter("generate")
            masters = list(worker.optimizer.tensors())
            slept = not any(tensor.numel() for tensor in masters)
            await parts.worker_group.files.save(folder)
            assert len(masters) > len(worker.optimizer.masters)
            return flat(read(folder / "state")), slept
        finally:
            await parts.close()

    plan = make_plan(recipe)
    first, second = tmp_path / "first", tmp_path / "second"
    (plain, awake), (other, asleep) = (asyncio.run(stated(p, first)) for p in (plan, with_sleep(plan)))
    assert (awake, asleep) == (False, True)
    assert plain == other
    again, both = (asyncio.run(stated(p, second, first)) for p in (plan, with_sleep(plan)))
    assert again[0] == both[0]


def flat(value):
    """Plain data of a state."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return {key: flat(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def cell(role, *phases):
    return {"role": role, "devices": ["localhost/cpu:0"], "sleeps": list(phases)}


CELLS = [cell("generate", "train"), cell("reference", "generate"), cell("train", "generate", "reference")]
KL = {"algorithm__kl": {"coef": 0.1, "estimator": "k2"}, "evaluate__every": 1, "placement__cluster": "1xcpu"}


def test_a_recipe_may_say_what_sleeps_and_its_run_may_be_resumed(tmp_path):
    plain = start(tmp_path, **KL).folder
    short = start(tmp_path, **KL, run__steps=1, placement__cells=CELLS).folder
    assert '"sleeps": [\n' in (short / "plan.json").read_text()
    resume(short, changes=["run.steps=3"], allow=["run"])
    assert metrics(short) == metrics(plain)
    ours, theirs = (tensors(folder / "checkpoints" / "step-000003") for folder in (short, plain))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["accumulate"])
def test_a_process_that_dies_while_something_sleeps_is_replaced(call, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # where workers look for `sleepy`
    recipe = recipe_in(tmp_path, model__dtype="float64", **STAGES)
    single, _ = asyncio.run(alone(recipe, tmp_path))
    devices = [f"localhost/cpu:{index}" for index in range(2)]
    launcher = processes(devices, seconds=300, make=Sleepy)
    hurt = dies(devices[1], call)
    worker_group = together(recipe, tmp_path, "flatten", launcher=launcher, hurt=hurt, change=with_sleep)
    weights, *_ = asyncio.run(worker_group)
    assert distance(single, weights) < 1e-10
