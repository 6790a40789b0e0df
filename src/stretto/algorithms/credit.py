"""Groups and advantages in, samples out: the only bridge between the mathematics and the records.

Model turns are credited per trajectory: every trained token of every conversation gets its trajectory's advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from stretto.algorithms.base import Streams
from stretto.algorithms.kl import ESTIMATORS
from stretto.config.schema import AlgorithmSection, Kl
from stretto.types import Group, Sample, Trajectory, trajectory_key

Floats = NDArray[np.float64]


def needed_streams(section: AlgorithmSection) -> frozenset[str]:
    """What a KL coefficient adds to an algorithm's own needs."""
    return frozenset({"reference"}) if section.kl.coef > 0 else frozenset()


def shaped_rewards(group: Group, streams: Streams, kl: Kl) -> Floats:
    """The group's rewards, less the KL to the reference summed over each trajectory where the recipe says "reward".

    The engine's log-probabilities serve as the policy's: this happens before the trainer has seen the tokens.
    """
    rewards = np.array([reward.value for reward in group.rewards])
    if kl.coef == 0 or kl.where != "reward":
        return rewards
    estimator = ESTIMATORS[kl.estimator]
    for row, trajectory in enumerate(group.trajectories):
        for index, conversation in enumerate(trajectory.conversations):
            reference = streams["reference"][(*trajectory_key(trajectory), index)]
            rewards[row] -= kl.coef * float(np.sum(estimator(conversation.logprobs[conversation.trained], reference)))
    return rewards


def spread(trajectory: Trajectory, advantage: float, streams: Streams) -> list[Sample]:
    """One sample per conversation, every trained token with the trajectory's advantage."""
    samples = []
    for index, conversation in enumerate(trajectory.conversations):
        key = (*trajectory_key(trajectory), index)
        length = int(conversation.trained.sum())
        samples.append(
            Sample(
                key=key,
                conversation=conversation,
                advantage=np.full(length, advantage),
                leads=index == 0,
                reference=streams["reference"][key] if "reference" in streams else None,
                values=streams["values"][key] if "values" in streams else None,
            )
        )
    return samples


def credit_by_group(
    groups: Sequence[Group], streams: Streams, *, advantages: Callable[[Floats], Floats], kl: Kl
) -> tuple[Sample, ...]:
    """The `advantage` of every algorithm whose credit depends on the rewards of one group only."""
    samples: list[Sample] = []
    for group in groups:
        values = advantages(shaped_rewards(group, streams, kl))
        for trajectory, value in zip(group.trajectories, values, strict=True):
            samples += spread(trajectory, float(value), streams)
    return tuple(samples)
