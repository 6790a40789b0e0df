"""The seam between the parts of a reward and whoever combines them.

A verdict is one number about one trajectory, or None where the part does not apply to it. A group verdict is that for
all judged trajectories of a group at once, made when the verdicts on each are there. Both are asynchronous because
some run in other processes, and both are functions of records alone. What they cannot judge they refuse with a
`StrettoError` or a `ValueError`. The score of a reward model is made where the models are, and handed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from stretto.types import FULL_MARKS, Trajectory


class Costly(float):
    """The verdict on an answer that a built-in scorer would never be done with. It is a number like others, 0."""


Verdict = Callable[[Trajectory], Awaitable[float | None]]
"""One part of a reward: what this trajectory is worth, usually between 0 and 1; None where the part does not apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedAnswer:
    """A trajectory of a group, as group verdicts see it."""

    trajectory: Trajectory
    """The trajectory."""
    outcome: float
    """The share of the full marks that the parts which judge it alone have given."""

    @property
    def right(self) -> bool:
        """True for full marks."""
        return self.outcome >= FULL_MARKS

    @property
    def tokens(self) -> int:
        """How many tokens the model sampled, in all conversations."""
        return sampled_tokens(self.trajectory)


GroupVerdict = Callable[[Sequence[JudgedAnswer]], Awaitable[Sequence[float | None]]]
"""A part that sees all judged answers of a group: a number, or None, for each of them, in their order."""

Scores = Mapping[tuple[str, int, int], float]
"""What a reward model says of trajectories, by their keys; of one that it could not read it says nothing."""

Ask = Callable[[Sequence[Trajectory]], Awaitable[Scores]]
"""Asks the reward model, about all at once, because it computes many as fast as one."""


def sampled_tokens(trajectory: Trajectory) -> int:
    """How many tokens the model sampled, in all conversations."""
    return sum(conversation.sampled for conversation in trajectory.conversations)
