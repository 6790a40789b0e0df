"""How long answers are: a distribution, never just a mean, because the longest few decide how long a step generates.

Either a lognormal that is cut at a cap, where what would be longer ends exactly there, or the lengths that a run has
recorded. Which prompt it is explains about 65 % of the variance of the logarithm (published for reasoning models), so
samples of one prompt resemble each other. The same seed gives the same lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from stretto.config.schema import Response
from stretto.errors import RecipeError

Counts = NDArray[np.int64]

PROMPT_SHARE = 0.65
"""Share of the variance of log-length that the prompt explains."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
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
            return float(np.quantile(np.asarray(self.recorded), share))
        z = _NORMAL.inv_cdf(min(max(share, 1e-12), 1 - 1e-12))
        return max(1.0, min(float(self.cap), math.exp(self.mu + self.sigma * z)))

    def sample(self, prompts: int, samples: int, *, seed: int = 0) -> Counts:
        """Lengths of `samples` answers to each of `prompts` prompts, at least 1: array (prompts, samples)."""
        source = np.random.default_rng(seed)
        common = source.standard_normal((prompts, 1)) * math.sqrt(PROMPT_SHARE)
        own = source.standard_normal((prompts, samples)) * math.sqrt(1 - PROMPT_SHARE)
        z = common + own
        if self.recorded:
            ranks = np.array([_NORMAL.cdf(value) for value in z.flat]).reshape(z.shape)
            drawn = np.quantile(np.asarray(self.recorded), ranks, method="inverted_cdf")
        else:
            drawn = np.exp(np.minimum(self.mu + self.sigma * z, math.log(self.cap)))
        whole: Counts = np.clip(np.rint(drawn), 1, self.cap).astype(np.int64)
        return whole

    @classmethod
    def of(cls, response: Response, *, field: str = "batch.lengths.response") -> Lengths:
        """What a recipe states."""
        if response.mean > response.cap:
            raise RecipeError.of(
                field, f"a mean of {response.mean:g} is above the cap of {response.cap}", "raise cap or lower mean"
            )
        return cls(mean=response.mean, sigma=response.sigma, cap=response.cap)

    @classmethod
    def from_samples(cls, lengths: Counts, *, cap: int | None = None) -> Lengths:
        """What a run recorded; there must be at least one."""
        values = np.sort(np.asarray(lengths, dtype=np.int64))
        logs = np.log(np.maximum(values, 1))
        longest = int(cap or values[-1])
        return cls(mean=float(values.mean()), sigma=float(logs.std()), cap=longest, recorded=tuple(map(int, values)))
