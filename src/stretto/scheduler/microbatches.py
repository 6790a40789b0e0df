"""Bounded work: what waits for a stage, and how it is cut into pieces for the cells that serve it.

Pieces follow the token budget, and are smaller where that lets the cells end together. Trajectories of a group stay
together, because their prompt is then computed once; a group is cut only where the rest is worth a second prompt, and
then into no more parts than there are cells for them.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from stretto.scheduler.records import RolloutId

SMALLEST = 8
"""A piece is not made smaller than this share of the budget: small ones are dear per token."""


class ReadyGroup(NamedTuple):
    """One group that a stage may work on."""

    number: int
    """The group's index in launch order."""
    prompt: int
    """Tokens that its trajectories share."""
    sizes: tuple[tuple[int, int], ...]
    """(attempt, tokens of its own) of each trajectory."""
    items: tuple[RolloutId, ...]
    """The trajectories that wait."""
    tokens: int
    """What it computes as a whole."""

    @classmethod
    def of(cls, number: int, prompt: int, sizes: tuple[tuple[int, int], ...]) -> ReadyGroup:
        """The group, with its sums worked out."""
        items = tuple([(number, attempt) for attempt, _ in sizes])
        return cls(number, prompt, sizes, items, prompt + sum([size for _, size in sizes]))


@dataclass(slots=True)
class StageQueue:
    """What waits for one stage."""

    in_order: bool = False
    """True if groups wait in launch order, whichever became ready first; nothing then follows from time."""
    groups: deque[ReadyGroup] = field(default_factory=deque)
    """In that order, or in the one in which they became ready."""
    tokens: int = 0
    """Tokens of all groups in the queue."""

    def put(self, group: ReadyGroup, *, first: bool = False) -> None:
        """A group waits; `first` for one that is done again."""
        if self.in_order:
            insort(self.groups, group, key=attrgetter("number"))
        else:
            (self.groups.appendleft if first else self.groups.append)(group)
        self.tokens += group.tokens

    def forget(self, index: int) -> None:
        """A group is not worked on after all."""
        dropped = [group for group in self.groups if group.number == index]
        for group in dropped:
            self.groups.remove(group)
            self.tokens -= group.tokens

    def cut(self, *, budget: int, share: float, cells: int) -> tuple[tuple[RolloutId, ...], int]:
        """The next piece and its tokens: about `share` of them, never more than `budget` if it can be helped.

        `cells` can begin with what waits. A group that is cut for them has its prompt computed by each, so its parts
        end together if the first is larger than its share of what the group is as a whole.
        """
        target = min(budget, max(math.ceil(share), budget // SMALLEST))
        items: list[RolloutId] = []
        tokens = 0
        while self.groups:
            group = self.groups[0]
            whole = tokens + group.tokens
            if items and (whole > budget or tokens + group.tokens / 2 > target):
                break
            self.groups.popleft()
            self.tokens -= group.tokens
            # All of a group, if that exceeds the target by no more than a second prompt would cost.
            spread = cells > 1 and whole - target > group.prompt
            if whole > budget or spread:
                most = target + group.prompt * (cells - 1) / cells if spread else budget
                count = _fitting(group, target=most - tokens, budget=budget - tokens)
                if count < len(group.sizes):
                    items += group.items[:count]
                    tokens += group.prompt + sum(size for _, size in group.sizes[:count])
                    self.put(ReadyGroup.of(group.number, group.prompt, group.sizes[count:]), first=True)
                    break
            items += group.items
            tokens = whole
        return tuple(items), tokens


def _fitting(group: ReadyGroup, *, target: float, budget: int) -> int:
    """How many trajectories of a group, at least one, go into a piece that should get `target` more tokens."""
    tokens = group.prompt
    for count, (_, size) in enumerate(group.sizes):
        if count and (tokens + size / 2 > target or tokens + size > budget):
            return count
        tokens += size
    return len(group.sizes)
