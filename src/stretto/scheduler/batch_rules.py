"""How the batch of a step comes about: how many groups each round launches, and which trajectories make which update.

Runs and forecasts ask here, so that they agree. Both rules follow from counts and keys, never from who finished first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=tuple[object, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRule:
    """How many groups a step launches, at first and in place of those that were dropped."""

    groups: int
    """Groups that the step wants to train on."""
    oversample: float = 1.0
    """How many groups are launched for each that is wanted."""
    most: int = 1
    """Rounds at most; 1 where no group is ever dropped."""

    @property
    def first(self) -> int:
        """Groups of the first round."""
        return math.ceil(self.groups * self.oversample)

    def again(self, missing: int, *, rounds: int) -> int:
        """Groups of another round after so many; 0 where there is none."""
        return math.ceil(missing * self.oversample) if rounds < self.most else 0


def shuffled_parts(keys: Iterable[Key], updates: int, *, epochs: int, seed: int, step: int) -> list[set[Key]]:
    """The trajectories of each update, epoch after epoch, at least one update; fewer trajectories than updates make
    fewer of them."""
    found = list(set(keys))
    if not found:
        return [set()]
    parts: list[set[Key]] = []
    for epoch in range(epochs):
        dealt = (seed, step, epoch) if epoch else (seed, step)
        order = sorted(found, key=lambda key: hashlib.blake2b(repr((*dealt, key)).encode()).digest())
        parts += [part for part in (set(order[index::updates]) for index in range(updates)) if part]
    return parts
