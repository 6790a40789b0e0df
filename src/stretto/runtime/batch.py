"""What a step learns from, as the loop and its reports see it, wherever and whenever it was sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stretto.rewards.base import sampled_tokens
from stretto.rewards.score import Scored
from stretto.scheduler.records import BufferedGroup, GroupStart
from stretto.types import Group, Sample, TrainedLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What a step learns from."""

    scored: Scored
    """Every trajectory of every round, judged or failed."""
    accepted: tuple[Group, ...]
    """The groups to train on, in launch order."""
    samples: tuple[Sample, ...]
    """Their conversations with their credit."""
    launched: int
    """How many groups were asked for."""
    rounds: int
    """How many rounds it took."""
    trained: TrainedLogprobs = field(default_factory=dict)
    """What the trainer says of them."""
    old: Mapping[tuple[str, int, int, int], NDArray[np.float64]] = field(default_factory=dict)
    """Conversation's key -> the policy's log-probabilities when it sampled, where the next step trains on it."""


def buffered(group: Group) -> BufferedGroup:
    """A group that is there already, as the scheduler sees it: what comes before the first trained token is shared."""
    first = next((talk for each in group.trajectories for talk in each.conversations if talk.trained.any()), None)
    prompt = 0 if first is None else int(first.trained.argmax())
    sizes = tuple(
        (each.attempt, sum(len(talk.tokens) for talk in each.conversations) - prompt if sampled_tokens(each) else 0)
        for each in group.trajectories
    )
    launch = GroupStart(prompt=group.prompt.id, prompt_tokens=prompt, samples=len(sizes), expected=0.0)
    return BufferedGroup(launch=launch, sizes=sizes)
