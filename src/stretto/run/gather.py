"""The sampling half of a step: rounds of prompts until there are enough groups worth training on.

An algorithm that drops nothing is served in one round. One that does gets other prompts for the dropped groups, up to
`batch.max_rounds`; after that the step trains on what is there. Groups are accepted in the order in which they were
launched, never in the order in which they finished: the first to finish are the short answers.
"""

from __future__ import annotations

import math

from stretto.rewards.score import Scored
from stretto.rollout.collect import Launch
from stretto.run import guards
from stretto.run.batch import Batch
from stretto.run.clock import Clock
from stretto.run.learn import credit, critic_streams, reference_streams, value_streams
from stretto.run.local import LocalParts
from stretto.types import Group


async def gather(parts: LocalParts, clock: Clock, *, step: int) -> Batch:
    """The first half of a strictly on-policy step. Of what a checkpoint holds only the prompt cursor moves, and what is
    only for speed: how long answers are expected to be, and how much memory holds."""
    batch, algorithm = parts.recipe.batch, parts.algorithm
    accepted: list[Group] = []
    every = Scored(groups=(), failed=())
    launched = rounds = 0
    while len(accepted) < batch.prompts and rounds < (batch.max_rounds if algorithm.drops else 1):
        missing = batch.prompts - len(accepted)
        asked = math.ceil(missing * batch.oversample)
        scored = await one_round(parts, clock, step=step, prompts=asked)
        accepted += [group for group in scored.groups if not algorithm.drop(group)]
        every = Scored(groups=every.groups + scored.groups, failed=every.failed + scored.failed)
        launched, rounds = launched + asked, rounds + 1
    guards.reward_errors(parts.recipe.guards, every, launched=launched * batch.samples)
    parts.lengths.stepped()
    accepted = accepted[: batch.prompts]
    with clock.stage("reference", "reference", step=step, version=parts.trainer.version):
        streams = {**reference_streams(parts, accepted), **value_streams(parts, accepted)}
    if "values" in algorithm.needs:
        with clock.stage("value", "value", step=step, version=parts.trainer.version):
            streams |= critic_streams(parts, accepted)
    return Batch(
        scored=every,
        accepted=tuple(accepted),
        samples=credit(algorithm, accepted, streams),
        launched=launched,
        rounds=rounds,
    )


async def one_round(parts: LocalParts, clock: Clock, *, step: int, prompts: int) -> Scored:
    """Asks so many prompts and judges the answers."""
    recipe, version = parts.recipe, parts.trainer.version
    launches = [
        Launch(prompt=prompt, visit=visit, attempt=attempt)
        for prompt, visit in parts.prompts.take(prompts)
        for attempt in range(recipe.batch.samples)
    ]
    with clock.stage("generate", "generate", step=step, version=version) as counts:
        trajectories = await parts.collect(launches, temperature=recipe.engine.temperature)
        lengths = [guards.sampled_tokens(trajectory) for trajectory in trajectories]
        counts["groups"], counts["tokens"] = prompts, sum(lengths)
    for trajectory, tokens in zip(trajectories, lengths, strict=True):
        parts.lengths.saw(trajectory.prompt.id, tokens)
    with clock.stage("reward", "reward", step=step, version=version):
        scored = await parts.score(trajectories, min_samples=parts.algorithm.min_samples)
    return scored
