"""Our side on several cells: the workers that `stretto train` starts for a recipe, following one plan after the other.

Workers are started once and serve every plan of a job; before each step everybody gets the same weights again. Answers
have lengths that were drawn once, by prompt and attempt. What is measured this way is in `stretto.bench.cells`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.bench.cases import SEED, answer_lengths
from stretto.bench.forced_lengths import ForcedLengthsWorker, Said, told
from stretto.bench.jobs import Job
from stretto.bench.ours import RATE, InTurn, rewards_of
from stretto.bench.prepare import PreparedPrompt, model_section
from stretto.bench.sized_models import sized_name
from stretto.engines.base import noise_key
from stretto.placement.build import plan_of
from stretto.placement.cluster import parse_cluster
from stretto.placement.plan import Plan
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.forecast import setting_of
from stretto.recipe.describe import reading_roles, roles_of
from stretto.recipe.schema import (
    AlgorithmSection,
    Correction,
    Critic,
    Kl,
    ModelReward,
    NativeEngineSection,
    Optimizer,
    Placement,
    Recipe,
    RoleModel,
    Roles,
    UpdateSection,
)
from stretto.recipe.schema import BatchSection as BatchSection
from stretto.runtime.batch import StepBatch
from stretto.runtime.build import build_runtime
from stretto.runtime.forecast import expectation
from stretto.runtime.runtime import Runtime
from stretto.runtime.schedule import take_step
from stretto.runtime.spans import Clock
from stretto.storage.manifest import STATE
from stretto.types import Trajectory
from stretto.workers.api import WorkerTransport
from stretto.workers.launchers.inprocess import Launcher, processes
from stretto.workers.stacks import ProcessStacks
from stretto.workers.worker_spec import WorkerSpec

DEVICES = ("localhost/cpu:0", "localhost/cpu:1")
"""Two cells of one thread each."""

COEF = 0.1
"""Coefficient of the KL term, where a case has one."""

Launch = Callable[[Sequence[str]], Launcher]
"""Starts workers that are told what to say, on these devices."""


def launched(devices: Sequence[str]) -> Launcher:
    """In processes of their own."""
    return processes(devices, seconds=300, make=ForcedLengthsWorker)


class SharedLauncher:
    """A launcher whose workers serve several crews, one after the other."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self.awaited = launcher, launcher.awaited
        self.members: dict[str, WorkerTransport] = {}
        self.opened = False

    async def open(self) -> None:
        """Once."""
        if not self.opened:
            await self.launcher.open()
        self.opened = True

    async def start(self, assignment: WorkerSpec) -> WorkerTransport:
        """The worker of a device; it can do whatever any plan asks of it."""
        if assignment.device not in self.members:
            every = frozenset(roles_of(assignment.recipe))
            self.members[assignment.device] = await self.launcher.start(replace(assignment, roles=every))
        return _Lent(self.members[assignment.device])

    def store(self) -> Any:
        """The launcher's."""
        return self.launcher.store()

    async def stacks(self) -> Sequence[ProcessStacks]:
        """The stacks of all worker processes."""
        return await self.launcher.stacks()

    async def close(self) -> None:
        """Others may still need the workers."""

    async def end(self) -> None:
        """Ends the workers."""
        await asyncio.gather(*(member.close() for member in self.members.values()), return_exceptions=True)
        await self.launcher.close()


class _Lent:
    """A worker that somebody else will end."""

    def __init__(self, member: WorkerTransport) -> None:
        self.call = member.call

    async def close(self) -> None:
        """Not now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStep:
    """One step that was taken."""

    seconds: float
    """How long it took."""
    idle: float
    """Share of the devices' seconds without work."""
    tail: float
    """Seconds in which a cell had nothing more to generate while another still did, over the number of cells."""
    stages: Mapping[str, float]
    """Seconds of each stage on a cell that serves it."""
    batch: StepBatch
    """What was learned from."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """In launch order."""
        return [trajectory for group in self.batch.accepted for trajectory in group.trajectories]

    @property
    def reward(self) -> float:
        """Mean over all of them."""
        return statistics.fmean(reward.value for group in self.batch.accepted for reward in group.rewards)


class SharedWorkers:
    """A recipe on the same workers under several plans."""

    def __init__(self, job: Job, launcher: Launcher, *, rate: float = RATE) -> None:
        self.job, self.recipe, self.launcher = job, recipe_of(job, rate=rate), launcher
        self.lengths = answer_lengths(job.case)
        self.parts: dict[str, Runtime] = {}
        self.started: dict[str, float] = {}
        self.folder = TemporaryDirectory(prefix="stretto-bench-")
        self.start = Path(self.folder.name, "start")

    async def assemble(self, names: Sequence[str]) -> None:
        """A worker group for each plan."""
        for name in names:
            begun = time.perf_counter()
            parts = await build_runtime(
                self.recipe,
                plan=plan_named(name, self.recipe),
                root=Path(self.job.model),
                folder=None,
                note=lambda text: None,
                launcher=self.launcher,
            )
            self.started[name] = time.perf_counter() - begun
            first = next(iter(self.parts.values()), parts)  # one pool judges for all
            self.parts[name] = replace(parts, prompts=InTurn(parts.heldout), pool=first.pool, rewards=first.rewards)
        await next(iter(self.parts.values())).worker_group.save(self.start)

    async def ready(
        self, name: str, asked: Sequence[PreparedPrompt], said: Mapping[int, Said], *, shows: bool = False
    ) -> None:
        """Gives a plan's workers the weights that all begin with, and what a step is about."""
        parts = self.parts[name]
        await parts.worker_group.meet()
        members = list(parts.worker_group.members)
        await parts.worker_group.all(members, lambda each: told(each).follow(parts.whitens), seconds=60)
        await parts.worker_group.restore(self.start / STATE)
        await self.about(name, asked, said, shows=shows)

    async def about(
        self, name: str, asked: Sequence[PreparedPrompt], said: Mapping[int, Said], *, shows: bool = False
    ) -> None:
        """What a step is about, with the weights as they are."""
        worker_group, prompts = self.parts[name].worker_group, self.parts[name].prompts
        lengths = {
            key_of(each, attempt): length
            for each, row in zip(asked, cycle(self.lengths.tolist()))  # two cells get the same lengths
            for attempt, length in enumerate(row)
        }
        await worker_group.all(
            list(worker_group.members), lambda each: told(each).tell(lengths, said, shows), seconds=60
        )
        assert isinstance(prompts, InTurn)
        prompts.coming = [each.prompt for each in asked]
        batch = self.recipe.batch.model_copy(update={"prompts": len(asked)})
        self.parts[name] = replace(self.parts[name], recipe=self.recipe.model_copy(update={"batch": batch}))

    async def step(self, name: str) -> ClusterStep:
        """Takes the step that everything is ready for."""
        parts = self.parts[name]
        clock = Clock(devices=parts.devices)
        clock.begin()
        batch = (await take_step(parts, clock, step=1)).batch
        metrics = clock.metrics()
        ends = defaultdict(float, {cell.name: 0.0 for cell in parts.plan.cells if cell.role == "generate"})
        for span in clock.spans:
            if span.stage == "generate":
                ends[span.cell] = max(ends[span.cell], span.start + span.seconds)
        return ClusterStep(
            seconds=metrics["seconds/step"],
            idle=metrics["idle"],
            tail=sum(max(ends.values()) - end for end in ends.values()) / len(ends),
            stages={name: seconds for name, seconds in metrics.items() if name.startswith("seconds/")},
            batch=batch,
        )

    async def gradient(self, name: str) -> NDArray[np.floating[Any]]:
        """The gradient of the plan's last step, of all models that are trained."""
        worker_group = self.parts[name].worker_group
        found = [
            await told(worker_group.worker(trained.holders[0], 60)).gradient(model)
            for model, trained in sorted(worker_group.trained.items())
        ]
        return np.concatenate(found)

    def expected(self, name: str) -> Mapping[str, Any] | None:
        """What the planner says of the plan's steps, with the lengths that are told."""
        parts, lengths = self.parts[name], self.lengths.flatten().tolist()
        section = Placement.model_validate({"cluster": f"{len(parts.plan.devices)}xcpu", **placed(name)})
        recipe = self.recipe.model_copy(update={"placement": section})
        setting = setting_of(recipe, Path(self.job.model), parse_cluster(section.cluster))
        drawn = LengthDistribution(
            mean=statistics.fmean(lengths), sigma=self.job.case.sigma, cap=max(lengths), recorded=tuple(sorted(lengths))
        )
        workload = replace(setting.workload, prompt=self.job.case.prompt, lengths=drawn)
        return expectation(recipe, replace(setting, workload=workload), parts.plan)

    async def close(self) -> None:
        """Ends everything."""
        self.folder.cleanup()
        for parts in self.parts.values():
            await parts.close()


def recipe_of(job: Job, *, rate: float = RATE) -> Recipe:
    """The case as a recipe; no step is the last, so that nothing is decayed."""
    case = job.case
    critic = Critic(name=sized_name(job, "critic"), optimizer=UpdateSection(lr=rate)) if case.critic else None
    kl = Kl(coef=COEF if case.reference else 0.0, where="reward" if case.critic else "loss")
    return Recipe(
        seed=SEED,
        model=model_section(job.model, case),
        roles=Roles(reward_model=RoleModel(name=sized_name(job, "judge")) if case.judge else None, critic=critic),
        rewards=(*rewards_of(case.cap), *([ModelReward(name="model")] if case.judge else [])),
        algorithm=AlgorithmSection(name="ppo" if case.critic else "grpo", correction=Correction(kind="none"), kl=kl),
        batch=BatchSection(prompts=case.prompts, samples=case.samples),
        engine=NativeEngineSection(max_new_tokens=case.cap),
        optimizer=Optimizer(lr=rate),
    )


def placed(name: str) -> dict[str, str]:
    """A plan's name as the keys of `placement`: a strategy, its shares behind it where it has some."""
    strategy, _, shares = name.partition(" ")
    if strategy in ("one", "other"):
        strategy = "flatten"
    return {"strategy": strategy, "fractions": shares} if shares else {"strategy": strategy}


def plan_named(name: str, recipe: Recipe) -> Plan:
    """A strategy on both devices; `one` and `other` are a plan on the first and on the second alone."""
    devices = {"one": DEVICES[:1], "other": DEVICES[1:]}.get(name, DEVICES)
    return plan_of(
        Placement.model_validate(placed(name)),
        roles=roles_of(recipe),
        devices=devices,
        reading=reading_roles(recipe),
    )


def key_of(asked: PreparedPrompt, attempt: int) -> int:
    """The key of the request for an answer to a prompt."""
    return noise_key(seed=SEED, visit=0, prompt=asked.prompt.id, attempt=attempt, context=asked.tokens, occurrence=0)


def said_in(did: ClusterStep, asked: Sequence[PreparedPrompt]) -> dict[int, Said]:
    """The answers of a step, by the keys of their requests."""
    by_id = {each.prompt.id: each for each in asked}
    said = {}
    for trajectory in did.trajectories:
        talk = trajectory.conversations[0]
        key = key_of(by_id[trajectory.prompt.id], trajectory.attempt)
        said[key] = talk.tokens[talk.trained], talk.logprobs[talk.trained]
    return said
