"""How fast cells are, learned from the steps before: what the scheduler weighs tails with.

A lane took a forward over the prompts that it began with, and its decode steps: a decode step of c trajectories takes
a + b (c - 1). Over a lane that is a x (its longest answer) + b x (all its tokens - its longest answer). Engines tell
which share of that does not grow with c, from decode steps of many sizes; where they do not, lanes of several steps
give a and b by least squares.

Cells may differ: CPU devices of one and of two threads, GPUs of two kinds, a host on which others work. How fast each
is beside the others of its role follows from what its lanes or pieces took and what they would have taken on average.
Nothing of a step's result depends on these numbers but which cell computes what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from operator import mul
from statistics import fmean

from stretto.scheduler.records import SpeedEstimate

FORGET = 0.5
"""What a step leaves of the weight of earlier ones: the first is slower than all that follow."""

SHARE = 1 / 2
"""What a forward costs of a piece of training; going on elsewhere begins with a forward over what is there. It is a
third where all weights are trained, and nearly half with an adapter (2.1 of 4.7 ms a token, SmolLM2 on two cores)."""


ALIKE = 1.15
"""Cells whose speeds differ less are taken to be equal: noise would otherwise cut groups that could stay whole."""


class SpeedEstimator:
    """Sums over lanes and pieces."""

    def __init__(self, *, round_seconds: float) -> None:
        self.round_seconds = round_seconds
        self.squares = [0.0] * 7
        # Generate cell -> the share of its decoding that does not grow with the answers, where its engine tells.
        self.overheads: dict[str, float] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.tokens: dict[str, float] = defaultdict(float)
        # Generate cell -> sums of its lanes: longest, other tokens, context, seconds.
        self.lanes: dict[str, list[float]] = {}
        # Stage -> cell -> sums of its pieces: tokens, seconds.
        self.pieces: dict[str, dict[str, list[float]]] = {}

    def lane(self, *, seconds: float, longest: int, tokens: int, context: int, cell: str = "") -> None:
        """A lane was open so long, for answers of so many tokens together, after `context` tokens of prompts."""
        added = (float(longest), float(tokens - longest), float(context), seconds)
        self.lanes[cell] = [sum(pair) for pair in zip(self.lanes.get(cell, [0.0] * 4), added, strict=True)]
        x, y = float(longest), float(tokens - longest)
        terms = (x * x, x * y, y * y, x * seconds, y * seconds, x * context, y * context)
        for index, term in enumerate(terms):
            self.squares[index] += term

    def decoded(self, overheads: Mapping[str, float]) -> None:
        """Which share of decoding did not grow with the number of answers, of cells whose engine tells."""
        self.overheads |= overheads

    def piece(self, stage: str, *, seconds: float, tokens: int, cell: str = "") -> None:
        """A piece took so long."""
        done = self.pieces.setdefault(stage, {}).setdefault(cell, [0.0, 0.0])
        done[0], done[1] = done[0] + tokens, done[1] + seconds
        self.seconds[stage] += seconds
        self.tokens[stage] += tokens

    def decay(self) -> None:
        """A step is over; what came before counts less."""
        self.squares = [term * FORGET for term in self.squares]
        for each in (self.lanes, *self.pieces.values()):
            for cell in each:
                each[cell] = [term * FORGET for term in each[cell]]
        for sums in (self.seconds, self.tokens):
            for stage in sums:
                sums[stage] *= FORGET

    def speeds(self) -> SpeedEstimate:
        """As far as they are known; a move costs a round of decoding and a forward over what is moved."""
        per_token = {stage: self.seconds[stage] / self.tokens[stage] for stage in self.tokens if self.tokens[stage]}
        again = SHARE * per_token.get("train", 0.0)
        tick, each = self._decode_costs(again)
        costs = (tick, each, again)
        usual = {
            cell: (sum(map(mul, costs, sums)), sums[-1]) for cell, sums in self.lanes.items()
        }  # seconds as on average, and as they were
        relative = relative_speeds(usual)
        for stage, cells in self.pieces.items():
            relative |= relative_speeds(
                {cell: (per_token[stage] * tokens, took) for cell, (tokens, took) in cells.items()}
            )
        return SpeedEstimate(
            tick=tick,
            tick_each=each,
            per_token=per_token,
            switch=self.round_seconds,
            again=again,
            relative=relative,
        )

    def _decode_costs(self, again: float) -> tuple[float, float]:
        """Seconds of a decode step of one answer, and of each further one."""
        told = {cell: sums for cell, sums in self.lanes.items() if cell in self.overheads}
        if told:  # of each cell by itself: to a slow one with few answers, their number would seem to matter little
            decoding = {cell: max(0.0, took - again * context) for cell, (*_, context, took) in told.items()}
            fixed = fmean(self.overheads[cell] * decoding[cell] / sums[0] for cell, sums in told.items())
            each = fmean((1 - self.overheads[cell]) * decoding[cell] / sum(sums[:2]) for cell, sums in told.items())
            return max(1e-6, fixed + each), each
        xx, xy, yy, xt, yt, xc, yc = self.squares
        xt, yt = xt - again * xc, yt - again * yc
        determinant = xx * yy - xy * xy
        each = max(0.0, (xx * yt - xy * xt) / determinant) if determinant > 1e-9 * xx * yy else 0.0
        return max(1e-6, (xt - each * xy) / xx) if xx else 0.01, each


def relative_speeds(cells: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """How fast cells are beside their mean, by (seconds that it would take on average, seconds that it took)."""
    ratios = {cell: usual / took for cell, (usual, took) in cells.items() if usual > 0 and took > 0}
    if len(ratios) < 2 or max(ratios.values()) < ALIKE * min(ratios.values()):
        return {}
    mean = sum(ratios.values()) / len(ratios)
    return {cell: ratio / mean for cell, ratio in ratios.items()}
