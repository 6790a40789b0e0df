"""How fast cells are, learned from the steps before: what the scheduler weighs tails with.

A lane took a forward over the prompts that it began with, and its decode steps: a decode step of c trajectories takes
a + b (c - 1). Over a lane that is a x (its longest answer) + b x (all its tokens - its longest answer), so lanes of
several steps give a and b by least squares. Nothing of a step's result depends on these numbers.
"""

from __future__ import annotations

from collections import defaultdict

from stretto.scheduler.records import SpeedEstimate

FORGET = 0.8
"""What a step leaves of the weight of earlier ones."""

SHARE = 1 / 2
"""What a forward costs of a piece of training; going on elsewhere begins with a forward over what is there. It is a
third where all weights are trained, and nearly half with an adapter (2.1 of 4.7 ms a token, SmolLM2 on two cores)."""


class SpeedEstimator:
    """Sums over lanes and pieces."""

    def __init__(self, *, round_seconds: float) -> None:
        self.round_seconds = round_seconds
        self.squares = [0.0] * 7
        self.seconds: dict[str, float] = defaultdict(float)
        self.tokens: dict[str, float] = defaultdict(float)

    def lane(self, *, seconds: float, longest: int, tokens: int, context: int) -> None:
        """A lane was open so long, for answers of so many tokens together, after `context` tokens of prompts."""
        x, y = float(longest), float(tokens - longest)
        terms = (x * x, x * y, y * y, x * seconds, y * seconds, x * context, y * context)
        for index, term in enumerate(terms):
            self.squares[index] += term

    def piece(self, stage: str, *, seconds: float, tokens: int) -> None:
        """A piece took so long."""
        self.seconds[stage] += seconds
        self.tokens[stage] += tokens

    def stepped(self) -> None:
        """A step is over; what came before counts less."""
        self.squares = [term * FORGET for term in self.squares]
        for sums in (self.seconds, self.tokens):
            for stage in sums:
                sums[stage] *= FORGET

    def speeds(self) -> SpeedEstimate:
        """As far as they are known; a move costs a round of decoding and a forward over what is moved."""
        per_token = {stage: self.seconds[stage] / self.tokens[stage] for stage in self.tokens if self.tokens[stage]}
        again = SHARE * per_token.get("train", 0.0)
        xx, xy, yy, xt, yt, xc, yc = self.squares
        xt, yt = xt - again * xc, yt - again * yc
        determinant = xx * yy - xy * xy
        each = max(0.0, (xx * yt - xy * xt) / determinant) if determinant > 1e-9 * xx * yy else 0.0
        tick = max(1e-6, (xt - each * xy) / xx) if xx else 0.01
        return SpeedEstimate(tick=tick, tick_each=each, per_token=per_token, switch=self.round_seconds, again=again)
