"""How long answers are: a distribution, never just a mean, because the longest few decide how long a step generates.

Either a lognormal that is cut at a cap, where what would be longer ends exactly there, or the lengths that a run has
recorded. Which prompt it is explains about 65 % of the variance of the logarithm (published for reasoning models), so
samples of one prompt resemble each other. The same seed gives the same lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

from stretto.errors import RecipeError
from stretto.recipe.schema import Response

Counts = tuple[tuple[int, ...], ...]
"""Lengths of the answers to each prompt."""

PROMPT_SHARE = 0.65
"""Share of the variance of log-length that the prompt explains."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthDistribution:
    """A distribution of answer lengths in tokens."""

    mean: float
    """Mean of what is generated, cut answers included."""
    sigma: float
    """Standard deviation of the logarithm before the cut; 0 for a fixed length."""
    cap: int
    """Longest; the probability of everything longer lies there."""
    recorded: tuple[int, ...] = ()
    """Sorted lengths of a run; where they are given, they are the distribution."""

    @property
    def mu(self) -> float:
        """Mean of the logarithm before the cut, such that the mean after it is `mean`."""
        low, high = math.log(max(self.mean, 0.5)) - 1.0 - self.sigma**2, math.log(self.cap) + 12.0 * self.sigma + 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return low

    def _cut_mean(self, mu: float) -> float:
        """E[min(X, cap)] for X lognormal: the textbook partial expectation plus the mass beyond the cap."""
        if self.sigma == 0:
            return min(math.exp(mu), self.cap)
        z = (math.log(self.cap) - mu) / self.sigma
        whole = math.exp(min(mu + self.sigma**2 / 2, 600.0))
        return whole * _NORMAL.cdf(z - self.sigma) + self.cap * (1 - _NORMAL.cdf(z))

    @property
    def cut(self) -> float:
        """Share of answers that end at the cap."""
        if self.recorded:
            return sum(length >= self.cap for length in self.recorded) / len(self.recorded)
        return (
            1 - _NORMAL.cdf((math.log(self.cap) - self.mu) / self.sigma) if self.sigma else float(self.mean >= self.cap)
        )

    def quantile(self, share: float) -> float:
        """The length that this share of answers does not exceed."""
        if self.recorded:
            import numpy as np  # here and below for runs alone, whose samples take longer to read than this to load

            return float(np.quantile(np.asarray(self.recorded), share))
        z = _NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12))
        return max(1.0, min(float(self.cap), math.exp(self.mu + self.sigma * z)))

    def sample(self, prompts: int, samples: int, *, seed: int = 0) -> Counts:
        """Lengths of `samples` answers to each of `prompts` prompts, at least 1."""
        normal, mu, most = Random(seed).gauss, 0.0 if self.recorded else self.mu, math.log(self.cap)
        shared, alone = math.sqrt(PROMPT_SHARE), math.sqrt(1 - PROMPT_SHARE)

        def length(z: float) -> int:
            if self.recorded:  # the shortest that as large a share of them does not exceed
                drawn = self.recorded[max(0, math.ceil(len(self.recorded) * _NORMAL.cdf(z) - 1))]
            else:
                drawn = round(math.exp(min(mu + self.sigma * z, most)))
            return min(max(drawn, 1), self.cap)

        common = [normal() * shared for _ in range(prompts)]
        return tuple(tuple(length(z + normal() * alone) for _ in range(samples)) for z in common)

    @classmethod
    def of(cls, response: Response, *, field: str = "batch.lengths.response") -> LengthDistribution:
        """What a recipe states."""
        if response.mean > response.cap:
            raise RecipeError.of(
                field, f"a mean of {response.mean:g} is above the cap of {response.cap}", "raise cap or lower mean"
            )
        return cls(mean=response.mean, sigma=response.sigma, cap=response.cap)

    @classmethod
    def from_samples(cls, lengths: Sequence[int], *, cap: int | None = None) -> LengthDistribution:
        """What a run recorded; there must be at least one."""
        import numpy as np

        values = np.sort(np.asarray(lengths, dtype=np.int64))
        logs = np.log(np.maximum(values, 1))
        longest = int(cap or values[-1])
        return cls(mean=float(values.mean()), sigma=float(logs.std()), cap=longest, recorded=tuple(map(int, values)))
