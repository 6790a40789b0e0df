"""What decode steps take, by how many answers they serve."""

from __future__ import annotations

NOTHING = (0.0,) * 5
"""The sums of no step."""


class DecodeTimes:
    """Sums over decode steps, from which follows which part of their seconds grows with the answers."""

    def __init__(self) -> None:
        self.sums: tuple[float, ...] = NOTHING
        self.fresh = True

    def note(self, answers: int, seconds: float) -> None:
        """A step that went on with so many answers; one that ended all of them decoded nothing, and the first with new
        weights may also have made copies of them."""
        fresh, self.fresh = self.fresh, False
        if answers and not fresh:
            added = (1.0, float(answers), float(answers) ** 2, seconds, answers * seconds)
            self.sums = tuple(map(sum, zip(self.sums, added, strict=True)))

    def take(self) -> tuple[float, ...]:
        """Steps, answers, their squares, seconds, and seconds times answers, since this was asked: at a publish."""
        taken, self.sums, self.fresh = self.sums, NOTHING, True
        return taken
