"""Held-out accuracy: greedy, one answer per prompt, with a Wilson interval; pass@k at the training temperature.

An attempt that failed for a reason of ours has no verdict and is left out of `n`; it never counts as a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.errors import RewardError
from stretto.rollout.collect import Launch
from stretto.run.crewed import CrewParts
from stretto.run.schedule import sample
from stretto.types import Group, Prompt, Trajectory

VISIT = -1
"""Evaluation's own visit number, so that its noise is never that of a training sample."""

FULL_MARKS = 1 - 1e-9
"""Outcomes are shares of the full marks; partial credit is not a right answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """How good the model is on prompts it was not trained on."""

    accuracy: float
    """Share of prompts answered right, greedily."""
    interval: tuple[float, float]
    """95 % Wilson interval of it."""
    pass_at_k: Mapping[int, float]
    """k -> chance that one of k sampled answers is right."""
    length_mean: float
    """Mean tokens per greedy answer."""
    n: int
    """Prompts with a verdict."""


def wilson(right: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % score interval of a share. Wilson 1927."""
    if n == 0:
        return (0.0, 1.0)
    share = right / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (0.0 if right == 0 else centre - half, 1.0 if right == n else centre + half)


def pass_at_k(right: int, n: int, k: int) -> float:
    """Chance that k of n samples, `right` of them right, hold a right one. Chen et al. 2021, eq. 1."""
    return 1.0 if n - right < k else 1.0 - math.comb(n - right, k) / math.comb(n, k)


async def evaluate(parts: CrewParts, prompts: Sequence[Prompt], *, pass_k: int) -> Evaluation:
    """Asks every prompt."""
    groups = await _answers(parts, prompts, attempts=1, temperature=0.0)
    right = sum(_right(group) for group in groups)
    lengths = [_length(trajectory) for group in groups for trajectory in group.trajectories]
    passes: dict[int, float] = {}
    if pass_k > 1:
        sampled = await _answers(parts, prompts, attempts=pass_k, temperature=parts.recipe.engine.temperature)
        powers = [2**e for e in range(pass_k.bit_length()) if 2**e < pass_k]
        for k in [*powers, pass_k]:
            chances = [pass_at_k(_right(g), len(g.rewards), k) for g in sampled if len(g.rewards) >= k]
            if chances:
                passes[k] = sum(chances) / len(chances)
    return Evaluation(
        accuracy=right / max(1, len(groups)),
        interval=wilson(right, len(groups)),
        pass_at_k=passes,
        length_mean=sum(lengths) / max(1, len(lengths)),
        n=len(groups),
    )


async def _answers(
    parts: CrewParts, prompts: Sequence[Prompt], *, attempts: int, temperature: float
) -> Sequence[Group]:
    """Scored attempts at each prompt."""
    launches = [
        Launch(prompt=prompt, visit=VISIT, attempt=attempt) for prompt in prompts for attempt in range(attempts)
    ]
    scored = await sample(parts, launches, temperature=temperature)
    if scored.failed and not scored.groups:
        raise RewardError(
            f"evaluation: none of {len(launches)} answers has a verdict, so there is no accuracy. The first one "
            f"(prompt {scored.failed[0].prompt.id}):\n{scored.failed[0].failure}"
        )
    return scored.groups


def _right(group: Group) -> int:
    return sum(reward.outcome >= FULL_MARKS for reward in group.rewards)


def _length(trajectory: Trajectory) -> int:
    return sum(int(conversation.trained.sum()) for conversation in trajectory.conversations)
