"""A step's trajectories in, groups with verdicts out; what could not be judged is set aside with the reason.

This is the only place where trajectories become groups. Nothing here is random, and time decides nothing but whether a
deadline has passed: the same trajectories with the same verdicts give the same groups in the same order, whatever
finished first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from stretto.errors import DeadlineError, VerdictError
from stretto.rewards.base import Ask, Scores
from stretto.rewards.combine import Rewards
from stretto.types import Group, Reward, Trajectory, trajectory_key

TOO_SMALL = "group too small after failures"
"""What a judged trajectory is marked with when too few of its group are left to learn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Every trajectory of a step, either in a group or failed."""

    groups: tuple[Group, ...]
    """In launch order, attempts in order, each with at least the asked number of samples."""
    failed: tuple[Trajectory, ...]
    """Those without a verdict or without a group, each with its `failure`, in launch order."""


async def score(
    trajectories: Sequence[Trajectory],
    rewards: Rewards,
    *,
    min_samples: int,
    deadline: float | None = None,
    ask: Ask | None = None,
    begun: Sequence[asyncio.Future[Verdicts]] = (),
) -> Scored:
    """Judges all trajectories at once and groups them by prompt and visit.

    `trajectories` stand in launch order: a group's place is that of its first trajectory. Groups with fewer than
    `min_samples` verdicts are dropped whole. DeadlineError if some have no verdict and no answer, of this call or of
    another that shares the workers, was judged for `deadline` seconds: so many answers may take as long as they need.
    A reward model, which `ask` reaches, has deadlines of its own. Where trajectories are judged from when they end,
    `begun` is what is to come of each.
    """
    judged = await _verdicts(
        [*begun] or [asyncio.ensure_future(judge(each, rewards)) for each in trajectories],
        trajectories,
        rewards,
        deadline,
    )
    sound = [each for each in trajectories if each.failure is None]
    scores = await ask(sound) if ask and rewards.modelled else {}
    verdicts = [_weighed(rewards, each, found, scores) for each, found in zip(trajectories, judged, strict=True)]
    together: dict[tuple[str, int], list[tuple[int, Trajectory, Reward | str]]] = {}
    for place, (trajectory, verdict) in enumerate(zip(trajectories, verdicts, strict=True)):
        together.setdefault((trajectory.prompt.id, trajectory.visit), []).append((place, trajectory, verdict))
    groups: list[Group] = []
    failed: dict[int, Trajectory] = {}
    for members in together.values():
        failed |= {place: replace(each, failure=reason) for place, each, reason in members if isinstance(reason, str)}
        kept = [(place, each, reward) for place, each, reward in members if isinstance(reward, Reward)]
        if len(kept) < max(min_samples, 1):
            failed |= {place: replace(trajectory, failure=TOO_SMALL) for place, trajectory, _ in kept}
        else:
            groups.append(_group([(trajectory, reward) for _, trajectory, reward in kept]))
    return Scored(groups=tuple(groups), failed=tuple(failed[place] for place in sorted(failed)))


Verdicts = Mapping[str, float] | str
"""Of one trajectory by the names of the parts, or why there are none."""


def _weighed(rewards: Rewards, trajectory: Trajectory, verdicts: Verdicts, scores: Scores) -> Reward | str:
    """The reward, the reward model's score included, or why there is none."""
    if isinstance(verdicts, str):
        return verdicts
    if name := rewards.modelled:
        score = scores.get(trajectory_key(trajectory))
        if score is None:
            return f"reward {name}: there is no conversation that the reward model could read"
        verdicts = {**verdicts, name: score}
    try:
        return rewards.weigh(verdicts)
    except VerdictError as error:
        return str(error)


async def _verdicts(
    tasks: Sequence[asyncio.Future[Verdicts]],
    trajectories: Sequence[Trajectory],
    rewards: Rewards,
    deadline: float | None,
) -> list[Verdicts]:
    """What every part but a model says, in the order of the trajectories."""
    began = last = time.monotonic()
    finished = asyncio.Event()
    left = len(tasks)

    def noted(task: asyncio.Future[Verdicts]) -> None:
        nonlocal last, left
        last, left = time.monotonic(), left - 1
        if not left or task.cancelled() or task.exception():
            finished.set()

    for task in tasks:
        task.add_done_callback(noted)
    try:
        while left and not finished.is_set():
            moved = max(last, rewards.moved)
            patience = None if deadline is None else moved + deadline - time.monotonic()
            if patience is not None and patience <= 0:
                raise DeadlineError(_overdue(trajectories, tasks, deadline or 0.0, last - began))
            # Looked at again after `deadline` at the latest: a worker that was starting may have begun to judge since.
            with suppress(TimeoutError):
                await asyncio.wait_for(finished.wait(), deadline and min(patience or 0.0, deadline))
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if left:
            await asyncio.gather(*tasks, return_exceptions=True)  # their processes are being killed


def _overdue(
    trajectories: Sequence[Trajectory], tasks: Sequence[asyncio.Future[Verdicts]], deadline: float, last: float
) -> str:
    """Who has no verdict, when the last came, and what to do."""
    waiting = [each for each, task in zip(trajectories, tasks, strict=True) if not task.done()]
    first = f"the first is prompt {waiting[0].prompt.id}, attempt {waiting[0].attempt}; " if waiting else ""
    return (
        f"reward: {len(waiting)} of {len(tasks)} trajectories have no verdict {deadline:g} s after the last was "
        f"generated or judged; {first}the last verdict came after {last:.1f} s\n"
        "    fix: raise deadlines.reward, lower the deadlines of rewards, or make them faster"
    )


async def judge(trajectory: Trajectory, rewards: Rewards) -> Verdicts:
    """What every part but a model says of one trajectory, or why nothing."""
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
