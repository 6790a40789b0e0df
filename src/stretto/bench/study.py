"""A published training set-up as a case: one answer per prompt, A*PO, 8-bit AdamW, recomputed activations.

There is no peer to run: what its authors measured stands beside our seconds, and on which machine. V* is either read
from a table that was made before, as `stretto train` does it, or estimated in every step from new answers of the
reference, as the study did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stretto.algorithms.base import Streams
from stretto.algorithms.optimal import optimal_value
from stretto.bench.cases import SEED, answer_lengths
from stretto.bench.jobs import Job, Measured
from stretto.bench.ours import RATE, REWARDS, ForcedEngine, measured_steps
from stretto.bench.prepare import Asked, model_section, read_prompts
from stretto.config.schema import AlgorithmSection, EngineSection, Optimizer, Recipe, Vstar
from stretto.config.schema import Batch as BatchSection
from stretto.rollout.collect import Launch
from stretto.run.learn import reference_streams
from stretto.run.local import LocalParts
from stretto.types import Group, trajectory_key

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
        algorithm=AlgorithmSection(name="astar_po", vstar=SECTION),
        batch=BatchSection(prompts=case.prompts, samples=case.samples),
        engine=EngineSection(max_new_tokens=int(answer_lengths(case).max())),
        optimizer=Optimizer(lr=RATE, name=case.optimizer, checkpointing=True),
    )


class Values:
    """The streams that A*PO needs: log-probabilities of the reference, and V*."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.engine: ForcedEngine | None = None

    async def __call__(self, parts: LocalParts, asked: Sequence[Asked], groups: Sequence[Group]) -> Streams:
        """Of a step's groups."""
        values = await self.estimated(parts, asked) if self.job.case.values else {}
        found = {
            (*trajectory_key(trajectory), 0): np.array([values.get(trajectory.prompt.id, STORED)])
            for group in groups
            for trajectory in group.trajectories
        }
        return {**reference_streams(parts, groups), "vstar": found}

    async def estimated(self, parts: LocalParts, asked: Sequence[Asked]) -> dict[str, float]:
        """V* from new answers of the reference."""
        case, reference = self.job.case, parts.reference or parts.policy
        if self.engine is None:
            lengths = answer_lengths(replace(case, samples=case.values))
            self.engine = ForcedEngine(reference, rounds=read_prompts(self.job), lengths=lengths)
        launches = [Launch(prompt=each.prompt, visit=0, attempt=n) for each in asked for n in range(case.values)]
        sampling = replace(parts, engine=self.engine)
        trajectories = await sampling.collect(launches, temperature=parts.recipe.engine.temperature, seed=SEED + 1)
        scored = await parts.score(trajectories, min_samples=1)
        return {
            group.prompt.id: optimal_value([reward.value for reward in group.rewards], SECTION.beta1)
            for group in scored.groups
        }


def step(job: Job) -> Measured:
    """Whole steps."""
    measured = measured_steps(job, recipe_of(job), streams=Values(job))
    prompts = [len(each.tokens) for each in read_prompts(job)[0]]
    return replace(measured, facts={**measured.facts, "prompts": prompts})
