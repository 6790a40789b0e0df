"""A published training set-up as a case: one answer per prompt, A*PO, 8-bit AdamW, recomputed activations.

There is no peer to run: what its authors measured stands beside our seconds, and on which machine. V* is either read
from a table that was made before, as `stretto train` does it, or estimated in every step from new answers of the
reference, as the study did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

from stretto.algorithms.optimal import optimal_value
from stretto.bench.cases import SEED, answer_lengths
from stretto.bench.jobs import Job, JobResult
from stretto.bench.ours import RATE, REWARDS, ForcedEngine, measured_steps
from stretto.bench.prepare import PreparedPrompt, model_section, read_prompts
from stretto.engines.base import Completion, Request
from stretto.engines.queue import EngineQueue
from stretto.environments.trajectory import EnvironmentBudget, RolloutStart, run_trajectory
from stretto.models.load import Policy
from stretto.recipe.schema import AstarPo, NativeEngineSection, Optimizer, Recipe, Vstar
from stretto.recipe.schema import BatchSection as BatchSection
from stretto.runtime.runtime import Runtime
from stretto.types import Trajectory
from stretto.workers.api import WorkerApi
from stretto.workers.models import EngineFactory
from stretto.workers.worker import Worker
from stretto.workers.worker_spec import WorkerSpec

SamplerFactory = Callable[[Policy], ForcedEngine]
"""Makes what samples the reference."""

STORED = 0.5
"""V* of a prompt where no answers are sampled for it: a number from a table, whichever it is."""

SECTION = Vstar()


def recipe_of(job: Job) -> Recipe:
    """The case as a recipe."""
    case = job.case
    return Recipe(
        seed=SEED,
        model=model_section(job.model, case),
        rewards=REWARDS,
        algorithm=AstarPo(vstar=SECTION),
        batch=BatchSection(prompts=case.prompts, samples=case.samples),
        engine=NativeEngineSection(max_new_tokens=int(answer_lengths(case).max())),
        optimizer=Optimizer(lr=RATE, name=case.optimizer, checkpointing=True),
    )


class StudyWorker(Worker):
    """A worker that can sample the reference, too."""

    def __init__(self, assignment: WorkerSpec, *, sampler: SamplerFactory, make_engine: EngineFactory) -> None:
        super().__init__(assignment, make_engine)
        self.sampler = sampler(self.reference or self.policy)

    def estimate(self, new: Sequence[Request], unwanted: Sequence[int], seconds: float) -> list[Completion]:
        """Like `generate`, by the reference."""
        self.sleepers.enter("reference")
        self.sampler.submit(new)
        return self.sampler.abort(unwanted) + self.sampler.step(seconds)


class StudyApi(WorkerApi, Protocol):
    """What can be asked of it besides."""

    async def estimate(
        self, new: Sequence[Request], unwanted: Sequence[int], seconds: float, /
    ) -> list[Completion]: ...


class Values:
    """V* of a step's prompts: a number from a table, or the estimate from new answers of the reference."""

    def __init__(self, job: Job) -> None:
        self.job = job

    async def __call__(self, parts: Runtime, asked: Sequence[PreparedPrompt]) -> Runtime:
        """The parts of a step that know it."""
        values = {each.prompt.id: STORED for each in asked}
        return replace(parts, values=values | (await self.estimated(parts, asked) if self.job.case.values else {}))

    async def estimated(self, parts: Runtime, asked: Sequence[PreparedPrompt]) -> dict[str, float]:
        """V* from new answers of the reference."""
        seconds, device = parts.recipe.deadlines.generate, parts.plan.devices[0]
        lane = EngineQueue(cast(StudyApi, parts.worker_group.worker(device, seconds)).estimate, together=True)
        sampling = parts.sampling(temperature=parts.recipe.engine.temperature, seed=SEED + 1)

        async def answer(launch: RolloutStart) -> Trajectory:
            with lane.trajectory():
                return await run_trajectory(
                    launch,
                    model=lane,
                    environment=parts.environment,
                    renderer=parts.renderer,
                    sampling=sampling,
                    outside=EnvironmentBudget(parts.recipe.environment.deadline, lane.whereabouts),
                )

        launches = [
            RolloutStart(prompt=each.prompt, visit=0, attempt=attempt)
            for each in asked
            for attempt in range(self.job.case.values)
        ]
        scored = await parts.score(await asyncio.gather(*map(answer, launches)), min_samples=1)
        return {
            group.prompt.id: optimal_value([reward.value for reward in group.rewards], SECTION.beta1)
            for group in scored.groups
        }


def step(job: Job) -> JobResult:
    """Whole steps."""
    rounds, lengths = read_prompts(job), answer_lengths(replace(job.case, samples=max(1, job.case.values)))
    make_worker = partial(StudyWorker, sampler=partial(ForcedEngine, rounds=rounds, lengths=lengths))
    measured = measured_steps(job, recipe_of(job), prepare=Values(job), make_worker=make_worker)
    return replace(measured, facts={**measured.facts, "prompts": [len(each.tokens) for each in rounds[0]]})
