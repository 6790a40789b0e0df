"""The seam between the parts of a reward and whoever combines them.

A verdict is one number about one trajectory. It is asynchronous because some verdicts run in other processes. What it
cannot judge it refuses with a `StrettoError` or a `ValueError`; it has no number that would mean "I do not know". The
score of a reward model is made where the models are, and handed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from stretto.types import Trajectory


class Costly(float):
    """The verdict on an answer that a built-in scorer would never be done with. It is a number like others, 0."""


Verdict = Callable[[Trajectory], Awaitable[float]]
"""One part of a reward: what this trajectory is worth, usually between 0 and 1."""

Scores = Mapping[tuple[str, int, int], float]
"""What a reward model says of trajectories, by their keys; of one that it could not read it says nothing."""

Ask = Callable[[Sequence[Trajectory]], Awaitable[Scores]]
"""Asks the reward model, about all at once, because it computes many as fast as one."""
