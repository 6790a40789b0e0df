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
from typing import Any, TypeVar

from stretto.errors import DeadlineError, VerdictError
from stretto.rewards.base import Ask, Scores
from stretto.rewards.combine import Rewards
from stretto.types import Group, Reward, Trajectory, trajectory_key

T = TypeVar("T")

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
    judged = await _finished(
        [*begun] or [asyncio.ensure_future(judge(each, rewards)) for each in trajectories],
        trajectories,
        rewards,
        deadline,
    )
    sound = [each for each in trajectories if each.failure is None]
    scores = await ask(sound) if ask and rewards.modeled else {}
    judged = [_with_score(rewards, each, found, scores) for each, found in zip(trajectories, judged, strict=True)]
    together: dict[tuple[str, int], list[int]] = {}
    for place, trajectory in enumerate(trajectories):
        together.setdefault((trajectory.prompt.id, trajectory.visit), []).append(place)
    judged = await _with_groups(trajectories, judged, list(together.values()), rewards, deadline)
    groups: list[Group] = []
    failed: dict[int, Trajectory] = {}
    for places in together.values():
        members = [(place, trajectories[place], _weighed(rewards, judged[place])) for place in places]
        failed |= {place: replace(each, failure=reason) for place, each, reason in members if isinstance(reason, str)}
        kept = [(place, each, reward) for place, each, reward in members if isinstance(reward, Reward)]
        if len(kept) < max(min_samples, 1):
            failed |= {place: replace(trajectory, failure=TOO_SMALL) for place, trajectory, _ in kept}
        else:
            groups.append(_group([(trajectory, reward) for _, trajectory, reward in kept]))
    return Scored(groups=tuple(groups), failed=tuple(failed[place] for place in sorted(failed)))


Verdicts = Mapping[str, float | None] | str
"""Of one trajectory by the names of the parts, or why there are none."""


def _with_score(rewards: Rewards, trajectory: Trajectory, verdicts: Verdicts, scores: Scores) -> Verdicts:
    """The verdicts with the reward model's score."""
    if isinstance(verdicts, str) or not (name := rewards.modeled):
        return verdicts
    score = scores.get(trajectory_key(trajectory))
    if score is None:
        return f"reward {name}: there is no conversation that the reward model could read"
    return {**verdicts, name: score}


async def _with_groups(
    trajectories: Sequence[Trajectory],
    judged: Sequence[Verdicts],
    groups: Sequence[Sequence[int]],
    rewards: Rewards,
    deadline: float | None,
) -> list[Verdicts]:
    """The verdicts with those of parts that see a whole group: all of its answers that have the others."""
    found = [_with_outcome(rewards, verdicts) for verdicts in judged] if rewards.sees_groups else list(judged)
    rated = [[place for place in group if not isinstance(found[place], str)] for group in groups]
    rated = [places for places in rated if places and rewards.sees_groups]

    async def one(places: Sequence[int]) -> None:
        before = {place: verdicts for place in places if not isinstance(verdicts := found[place], str)}
        try:
            more = await rewards.judge_group([trajectories[place] for place in before], list(before.values()))
        except VerdictError as error:
            for place in places:
                found[place] = str(error)
            return
        for (place, verdicts), new in zip(before.items(), more, strict=True):
            found[place] = {**verdicts, **new}

    tasks = [asyncio.ensure_future(one(places)) for places in rated]
    await _finished(tasks, [trajectories[places[0]] for places in rated], rewards, deadline)
    return found


def _with_outcome(rewards: Rewards, verdicts: Verdicts) -> Verdicts:
    """The verdicts, or why nothing that sees the group can go by them."""
    if not isinstance(verdicts, str):
        try:
            rewards.outcome(verdicts)
        except VerdictError as error:
            return str(error)
    return verdicts


def _weighed(rewards: Rewards, verdicts: Verdicts) -> Reward | str:
    """The reward, or why there is none."""
    if isinstance(verdicts, str):
        return verdicts
    try:
        return rewards.weigh(verdicts)
    except VerdictError as error:
        return str(error)


async def _finished(
    tasks: Sequence[asyncio.Future[T]],
    trajectories: Sequence[Trajectory],
    rewards: Rewards,
    deadline: float | None,
) -> list[T]:
    """What comes of tasks that judge, in order; each stands for one of the trajectories."""
    if all(task.done() for task in tasks):
        return [task.result() for task in tasks]
    began = last = time.monotonic()
    finished = asyncio.Event()
    left = len(tasks)

    def noted(task: asyncio.Future[T]) -> None:
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
    trajectories: Sequence[Trajectory], tasks: Sequence[asyncio.Future[Any]], deadline: float, last: float
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
