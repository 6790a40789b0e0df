"""Bounded work: what waits for a stage, and how it is cut into pieces for the cells that serve it.

Pieces follow the token budget, and are smaller where that lets the cells end together. Trajectories of a group stay
together, because their prompt is then computed once; a group is cut only where the rest is worth a second prompt.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from stretto.step.work import Item

SMALLEST = 8
"""A piece is not made smaller than this share of the budget: small ones are dear per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One group that a stage may work on."""

    index: int
    """Its index in launch order."""
    prompt: int
    """Tokens that its trajectories share."""
    sizes: tuple[tuple[int, int], ...]
    """(attempt, tokens of its own) of each trajectory."""
    tokens: int = field(init=False)
    """What it computes as a whole; asked for often, like `items`, so added up once."""
    items: tuple[Item, ...] = field(init=False)
    """Its trajectories."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", self.prompt + sum([size for _, size in self.sizes]))
        object.__setattr__(self, "items", tuple([(self.index, attempt) for attempt, _ in self.sizes]))


@dataclass(slots=True)
class Queue:
    """What waits for one stage."""

    groups: deque[Ready] = field(default_factory=deque)
    """In the order in which they became ready."""
    tokens: int = 0
    """Of all of them."""

    def put(self, group: Ready, *, first: bool = False) -> None:
        """A group waits; `first` for one that is done again."""
        (self.groups.appendleft if first else self.groups.append)(group)
        self.tokens += group.tokens

    def forget(self, index: int) -> None:
        """A group is not worked on after all."""
        dropped = [group for group in self.groups if group.index == index]
        for group in dropped:
            self.groups.remove(group)
            self.tokens -= group.tokens

    def cut(self, *, budget: int, share: float) -> tuple[tuple[Item, ...], int]:
        """The next piece and its tokens: about `share` of them, never more than `budget` if it can be helped."""
        target = min(budget, max(math.ceil(share), budget // SMALLEST))
        items: list[Item] = []
        tokens = 0
        while self.groups:
            group = self.groups[0]
            if items and (tokens + group.tokens > budget or tokens + group.tokens / 2 > target):
                break
            count = _fitting(group, target=target - tokens, budget=budget - tokens)
            self.groups.popleft()
            self.tokens -= group.tokens
            if count == len(group.sizes):
                items += group.items
                tokens += group.tokens
            else:
                items += group.items[:count]
                tokens += group.prompt + sum(size for _, size in group.sizes[:count])
                self.put(Ready(index=group.index, prompt=group.prompt, sizes=group.sizes[count:]), first=True)
                break
        return tuple(items), tokens


def _fitting(group: Ready, *, target: int, budget: int) -> int:
    """How many trajectories of a group, at least one, go into a piece that should get `target` more tokens.

    All of them if they exceed it by no more than a second prompt would cost.
    """
    if group.tokens <= budget and group.tokens - target <= group.prompt:
        return len(group.sizes)
    tokens = group.prompt
    for count, (_, size) in enumerate(group.sizes):
        if count and (tokens + size / 2 > target or tokens + size > budget):
            return count
        tokens += size
    return len(group.sizes)
