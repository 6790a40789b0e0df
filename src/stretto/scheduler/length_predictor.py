"""How long answers will be, learned from those that were: for dispatch, never for results.

Lengths are taken to be lognormal: most are short, a few very long. What a prompt's earlier visits became says most
about its next visit (prompts explain about two thirds of the variance of log-lengths in published runs), the rest is
drawn towards all prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

SHRINK = 0.5
"""Weight of all prompts beside one earlier visit: (1 - 0.65) / 0.65, from the share of variance that prompts
explain."""

NORMAL = NormalDist()

FORGET = 0.98
"""What a step leaves of the weight of earlier ones, so that answers which grow in training are followed."""


class LengthPredictor:
    """Expectations of lengths; a part of checkpoints, because dispatch follows them."""

    name = "lengths"

    def __init__(self, *, longest: int) -> None:
        self.longest = longest
        self.count = self.total = self.squares = 0.0
        self.of: dict[str, tuple[int, float]] = {}

    def observe(self, prompt: str, tokens: int) -> None:
        """A trajectory of a prompt ended after so many sampled tokens."""
        log = math.log(max(1, tokens))
        self.count, self.total, self.squares = self.count + 1, self.total + log, self.squares + log * log
        times, mean = self.of.get(prompt, (0, 0.0))
        self.of[prompt] = (times + 1, mean + (log - mean) / (times + 1))

    def decay(self) -> None:
        """A step is over; what came before counts a little less."""
        self.count, self.total, self.squares = (x * FORGET for x in (self.count, self.total, self.squares))

    @property
    def spread(self) -> float:
        """Standard deviation of log-lengths; 1 until two were seen."""
        if self.count < 2:
            return 1.0
        mean = self.total / self.count
        return math.sqrt(max(0.01, self.squares / self.count - mean * mean))

    @property
    def middle(self) -> float:
        """Mean log-length; before any was seen, that of half the limit."""
        return self.total / self.count if self.count else math.log(max(1.0, self.longest / 2))

    def expected(self, prompt: str) -> float:
        """Tokens that a trajectory of this prompt is expected to generate."""
        times, own = self.of.get(prompt, (0, 0.0))
        # A visit of eight samples does not tell eight times what one tells: what they share counts once.
        weight = min(1.0, times) / (min(1.0, times) + SHRINK)
        log = weight * own + (1 - weight) * self.middle
        return min(float(self.longest), math.exp(log + self.spread**2 / 2))

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"sums": [self.count, self.total, self.squares], "prompts": {k: list(v) for k, v in self.of.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with what was seen before."""
        self.count, self.total, self.squares = state["sums"]
        self.of = {prompt: (times, mean) for prompt, (times, mean) in state["prompts"].items()}


def likely_longest(expected: float, spread: float, count: int, longest: int) -> float:
    """The longest of so many lognormal lengths of this mean, as it is in the middle of many tries."""
    return min(float(longest), expected * math.exp(spread * NORMAL.inv_cdf(0.5 ** (1 / count)) - spread**2 / 2))


def remaining(expected: float, spread: float, done: float, longest: int) -> float:
    """Tokens still expected from a lognormal length of this mean, given that `done` tokens were not enough.

    The longer a heavy-tailed answer has gone on, the longer it is expected to go on; the limit cuts that off.
    """
    left = max(0.0, longest - done)
    if done <= 0:
        return min(expected, left)
    middle = math.log(max(expected, 1.0)) - spread**2 / 2
    short = (middle - math.log(done)) / spread
    survives = _normal(short)
    if survives < 1e-9:
        return left
    return min(left, max(1.0, expected * _normal(short + spread) / survives - done))


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
