"""A step's trajectories in, groups with verdicts out; what could not be judged is set aside with the reason.

This is the only place where trajectories become groups. Nothing here is random or timed: the same trajectories with the
same verdicts give the same groups in the same order, whatever finished first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.errors import VerdictError
from stretto.rewards.combine import Rewards
from stretto.types import Group, Reward, Trajectory

TOO_SMALL = "group too small after failures"
"""What a judged trajectory is marked with when too few of its group are left to learn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Every trajectory of a step, either in a group or failed."""

    groups: tuple[Group, ...]
    """In launch order, attempts in order, each with at least the asked number of samples."""
    failed: tuple[Trajectory, ...]
    """Those without a verdict or without a group, each with its `failure`, in launch order."""


async def score(trajectories: Sequence[Trajectory], rewards: Rewards, *, min_samples: int) -> Scored:
    """Judges all trajectories at once and groups them by prompt and visit.

    `trajectories` stand in launch order: a group's place is that of its first trajectory. Groups with fewer than
    `min_samples` verdicts are dropped whole.
    """
    verdicts = await asyncio.gather(*(_judge(trajectory, rewards) for trajectory in trajectories))
    together: dict[tuple[str, int], list[tuple[int, Trajectory, Reward | str]]] = {}
    for place, (trajectory, verdict) in enumerate(zip(trajectories, verdicts, strict=True)):
        together.setdefault((trajectory.prompt.id, trajectory.visit), []).append((place, trajectory, verdict))
    groups: list[Group] = []
    failed: dict[int, Trajectory] = {}
    for members in together.values():
        failed |= {place: replace(each, failure=reason) for place, each, reason in members if isinstance(reason, str)}
        judged = [(place, each, reward) for place, each, reward in members if isinstance(reward, Reward)]
        if len(judged) < max(min_samples, 1):
            failed |= {place: replace(trajectory, failure=TOO_SMALL) for place, trajectory, _ in judged}
        else:
            groups.append(_group([(trajectory, reward) for _, trajectory, reward in judged]))
    return Scored(groups=tuple(groups), failed=tuple(failed[place] for place in sorted(failed)))


async def _judge(trajectory: Trajectory, rewards: Rewards) -> Reward | str:
    """The verdict, or why there is none."""
    if trajectory.failure is not None:
        return trajectory.failure
    try:
        return await rewards.judge(trajectory)
    except VerdictError as error:
        return str(error)


def _group(judged: list[tuple[Trajectory, Reward]]) -> Group:
    judged = sorted(judged, key=lambda pair: pair[0].attempt)
    return Group(
        prompt=judged[0][0].prompt,
        trajectories=tuple(trajectory for trajectory, _ in judged),
        rewards=tuple(reward for _, reward in judged),
    )
