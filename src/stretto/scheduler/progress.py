"""How far the groups of a step have come, as the scheduler keeps it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stretto.scheduler.records import GroupStart, RolloutId


@dataclass(slots=True)
class GroupProgress:
    """How far one group has come."""

    launch: GroupStart
    """What it is."""
    unfinished: int
    """Trajectories that are still generated."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Attempt -> its generated tokens, of those that ended well."""
    judged: bool = False
    """True once there is a verdict."""
    attempts: frozenset[int] = frozenset()
    """Attempts that have one; none if the group was dropped."""
    scores: dict[str, int] = field(default_factory=dict)
    """Stage it was handed to -> trajectories that this stage has not scored yet."""
    handed: bool = False
    """True once it was handed to training."""

    @property
    def gone(self) -> bool:
        """True if it will not be trained on."""
        return self.judged and not self.attempts


def by_group(items: Iterable[RolloutId]) -> dict[int, list[int]]:
    """Group -> its attempts among these trajectories."""
    found: dict[int, list[int]] = {}
    for index, attempt in items:
        found.setdefault(index, []).append(attempt)
    return found
