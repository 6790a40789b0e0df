"""The same task of ARC in other colors and seen from another side, and the way back.

A rule about grids stays a rule when all colors but the background's are swapped and every grid is turned or mirrored
alike. Which variant is which follows from the recipe's seed, the task and a number, so it is the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

Rows = list[list[int]]
COLORS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """One way to change every grid of a task."""

    colors: tuple[int, ...]
    """What each of the ten colors becomes; 0, the background, stays."""
    mirrored: bool
    """True if every row is turned round first."""
    turns: int
    """Quarter turns clockwise after that."""

    @classmethod
    def drawn(cls, seed: int, task: str, number: int) -> Augmentation:
        """The variant of this number."""
        key = hashlib.shake_128(f"arc|{seed}|{task}|{number}".encode()).digest(2 * COLORS)
        ranks = {color: key[2 * color : 2 * color + 2] for color in range(1, COLORS)}
        swapped = sorted(ranks, key=lambda color: (ranks[color], color))
        return cls(colors=(0, *swapped), mirrored=bool(key[0] & 1), turns=key[1] & 3)

    def apply(self, grid: Sequence[Sequence[int]]) -> Rows:
        """The grid as it is in this variant."""
        rows = [[self.colors[cell] for cell in row] for row in grid]
        if self.mirrored:
            rows = [row[::-1] for row in rows]
        for _ in range(self.turns):
            rows = _turned(rows)
        return rows

    def undo(self, grid: Sequence[Sequence[int]]) -> Rows:
        """The grid as it was: what `apply` is given to make this one."""
        rows = [list(row) for row in grid]
        for _ in range(-self.turns % 4):
            rows = _turned(rows)
        if self.mirrored:
            rows = [row[::-1] for row in rows]
        return [[self.colors.index(cell) for cell in row] for row in rows]


def _turned(rows: Rows) -> Rows:
    """A quarter turn clockwise."""
    return [list(row) for row in zip(*rows[::-1], strict=True)]
