"""Two hundred verdicts at once while worker processes are killed: nothing hangs, and no kill is a reward of 0."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress

import pytest

from stretto.recipe.schema import RewardPart
from stretto.rewards.combine import Rewards
from stretto.rewards.score import Scored, score
from stretto.sandbox.pool import Pool
from stretto.types import Outcome, Prompt, Trajectory

ANSWERS = [
    (r"\boxed{1/2}", 1.0),
    (r"\boxed{0.5}", 1.0),
    (r"\boxed{2}", 0.0),
    ("no idea", 0.0),
    (r"\boxed{9^{9^{9^9}}}", 0.0),
]


def asked(count: int) -> list[Trajectory]:
    return [
        Trajectory(
            prompt=Prompt(id=str(n // 10), messages=(), reference=r"\frac{1}{2}"),
            visit=0,
            attempt=n % 10,
            conversations=(),
            outcome=Outcome(answer=ANSWERS[n % 5][0]),
        )
        for n in range(count)
    ]


async def under_fire(count: int, kills: int) -> tuple[Scored, int]:
    dice, killed = random.Random(0), 0
    async with Pool(workers=4) as pool:
        rewards = Rewards((RewardPart(kind="math", deadline=5.0),), pool)
        scoring = asyncio.ensure_future(score(asked(count), rewards, min_samples=1, deadline=60.0))
        while not scoring.done() and killed < kills:
            await asyncio.sleep(0.05)
            if pool.pids:
                with suppress(ProcessLookupError):
                    os.kill(dice.choice(pool.pids), signal.SIGKILL)
                    killed += 1
        return await asyncio.wait_for(scoring, 120), killed


@pytest.mark.slow
def test_killed_workers_cost_verdicts_at_most_and_never_a_reward() -> None:
    scored, killed = asyncio.run(under_fire(200, 25))
    judged = [
        (trajectory, reward)
        for group in scored.groups
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True)
    ]
    assert killed > 0
    assert len(judged) + len(scored.failed) == 200 and len(judged) > 100
    assert all(reward.value == ANSWERS[trajectory.attempt % 5][1] for trajectory, reward in judged)
    assert all("killed" in str(each.failure) for each in scored.failed)
