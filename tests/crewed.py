"""Runs of some steps, plain and on crews, for tests that compare them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

from sequential import Sequential
from stretto.errors import WorkerLost
from stretto.placement.build import plan_of
from stretto.recipe.describe import roles_of
from stretto.runtime import guards
from stretto.runtime.build import build_runtime
from stretto.runtime.schedule import run_step
from stretto.runtime.spans import Clock
from stretto.storage.tensors import read_parts
from stretto.training.parallel.zero1 import merge_states
from stretto.workers.launchers.inprocess import ThreadLauncher

STEPS = 3
"""Steps taken."""

STAGES = {
    "roles": {"critic": {"name": "scratch"}, "reward_model": {"name": "scratch"}},
    "rewards": [{"name": "accuracy", "kind": "numeric"}, {"name": "quality", "kind": "model", "weight": 0.5}],
    "algorithm": {"name": "ppo", "kl": {"coef": 0.1}},
    "optimizer__lr": 1e-4,
}
"""A reward model, a reference and a critic, all with something to say."""


async def alone(recipe, folder, **made):
    """Weights and reports after some plain steps on one device."""
    plain = Sequential(recipe, folder, **made)
    try:
        reports = [plain.learn((await plain.sampled()).samples, step=step) for step in range(1, STEPS + 1)]
        return plain.weights(), reports
    finally:
        await plain.close()


async def together(recipe, folder, strategy, *, devices=2, launcher=None, hurt=None, change=None):
    """Weights, reports and the last step's times after as many on workers; `hurt` may do things to it before.

    `change` makes another plan of the strategy's.
    """
    plan = plan_of(
        recipe.placement.model_copy(update={"strategy": strategy}),
        roles=roles_of(recipe),
        devices=tuple(f"localhost/cpu:{index}" for index in range(devices)),
    )
    plan = change(plan) if change else plan
    workers = launcher or ThreadLauncher()
    parts = await build_runtime(recipe, plan=plan, root=folder, folder=folder, note=print, launcher=workers)
    try:
        clock = Clock(devices=parts.devices)
        if hurt:
            hurt(parts.worker_group)
        reports = await steps(parts, clock)
        state = await saved(parts.worker_group, folder)
        return state["optimizer"]["masters"], reports, clock.metrics()
    finally:
        await parts.close()


async def saved(worker_group, folder):
    """What a group's workers write for a checkpoint, read again."""
    await worker_group.save(folder / "saved")
    return read(folder / "saved" / "state")


def read(state):
    """What workers have written into a folder."""
    (trainer,) = read_parts(state, "trainer")
    found = {"trainer": trainer, "optimizer": merge_states(read_parts(state, "optimizer"))}
    if (state / "critic.json").exists():
        found["critic"] = merge_states(read_parts(state, "critic_optimizer"))
    return found


async def steps(parts, clock, checkpoint=None):
    """The reports of some steps."""
    await parts.restored(checkpoint)
    reports = []
    for step in range(1, STEPS + 1):
        clock.begin()
        taken = await run_step(parts, clock, step=step)
        guards.finite(parts.recipe.guards, taken.updates[-1], step=step)
        reports.append(taken.report)
    return reports


def with_sleep(plan):
    """The plan in which every cell sleeps while others work on its devices."""

    def others(cell):
        return tuple({c.role: None for c in plan.cells if set(c.devices) & set(cell.devices) and c.role != cell.role})

    return replace(plan, cells=tuple(replace(cell, sleeps=others(cell)) for cell in plan.cells))


def with_parts(plan):
    """The plan in which training cells share the optimizer."""
    return replace(plan, optimizer="sharded")


def distance(one, other):
    """Largest difference of two sets of weights."""
    return max(float((one[name].cpu() - other[name].cpu()).abs().max()) for name in one)


class Dying:
    """A member whose process is killed at one of its calls."""

    def __init__(self, member, what, number):
        self.member, self.what, self.left = member, what, number

    async def call(self, what, *arguments):
        if what == self.what:
            self.left -= 1
            if self.left == 0:
                os.kill(self.member.process, signal.SIGKILL)
        return await self.member.call(what, *arguments)

    async def close(self):
        await self.member.close()


def dies(device, what, number=2):
    """Kills the process of a device at its so manieth call of a kind."""

    def hurt(worker_group):
        worker_group.members[device] = Dying(worker_group.members[device], what, number)

    return hurt


class Mortal:
    """A member that is gone from its n-th call of a kind on."""

    def __init__(self, member, device, what, number, died):
        self.member, self.device, self.what, self.left, self.died = member, device, what, number, died

    async def call(self, what, *arguments):
        self.left -= what == self.what
        if self.left <= 0:
            self.died.add(self.device)
            raise WorkerLost(self.device, "its process has died")
        return await self.member.call(what, *arguments)

    async def close(self):
        await self.member.close()


class Fragile(ThreadLauncher):
    """Starts workers, of which one device's are mortal, the first so many of them."""

    def __init__(self, device, what, number=1, deaths=1):
        super().__init__()
        self.device, self.what, self.number, self.deaths, self.died = device, what, number, deaths, set()

    async def start(self, assignment):
        member = await super().start(assignment)
        if assignment.device != self.device or not self.deaths:
            return member
        self.deaths -= 1
        return Mortal(member, self.device, self.what, self.number, self.died)
