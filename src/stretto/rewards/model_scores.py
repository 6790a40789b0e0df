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
    """The score of each trajectory, which is that of its last conversation; none where there was nothing to read."""
    read = [each for each in trajectories if each.conversations]
    found = await measure([each.conversations[-1] for each in read])
    told = zip(read, found, strict=True)
    return {trajectory_key(trajectory): float(numbers[0]) for trajectory, numbers in told if len(numbers)}
