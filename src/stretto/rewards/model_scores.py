"""A reward model's side of a verdict: what it reads of a trajectory, and whose its numbers are.

Which process it computes in is its caller's business; what else a reward is made of, that of `stretto.rewards`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.rewards.base import Scores
from stretto.types import Conversation, Trajectory, trajectory_key

Measure = Callable[[Sequence[Conversation]], Awaitable[Sequence[NDArray[np.float64]]]]
"""Has a model say its numbers of conversations."""


async def reward_model_scores(trajectories: Sequence[Trajectory], *, measure: Measure) -> Scores:
    """The score of each trajectory, which is that of the conversation with its last reply; none where there was nothing
    to read."""
    read = [each for each in trajectories if each.conversations]
    found = await measure([_with_last_reply(each) for each in read])
    told = zip(read, found, strict=True)
    return {trajectory_key(trajectory): float(numbers[0]) for trajectory, numbers in told if len(numbers)}


def _with_last_reply(trajectory: Trajectory) -> Conversation:
    """An earlier one may have gone on after the last was opened. Where nobody counted calls, it is the last."""
    talks = trajectory.conversations
    return max(talks, key=lambda talk: talk.turns[-1][0]) if all(talk.turns for talk in talks) else talks[-1]
