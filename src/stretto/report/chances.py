"""Whether two accuracies can be told apart: exact tests and intervals, of the same prompts or of different ones.

Formulas: the exact test of McNemar (1947) for pairs, Newcombe's (1998) method 10 for the interval of a difference and
his for pairs (method 8 without continuity correction), Fisher's exact test for different prompts. Nothing here reads a
run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.storage.pass_rates import wilson

LEVEL = 0.05
"""Two accuracies are told apart where chance alone would differ as much less often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far the second of two accuracies is above the first."""

    value: float
    """The difference."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    """Upper end."""
    chance: float
    """Chance of a difference at least as large between two equal models (two-sided)."""
    paired: bool
    """True if both are of the same prompts, and were compared prompt by prompt."""
    prompts: int
    """Prompts of the smaller side, or pairs."""

    @property
    def told_apart(self) -> bool:
        """True if it is not plausibly chance."""
        return self.chance < LEVEL


def paired(first: Mapping[str, bool], second: Mapping[str, bool]) -> Difference | None:
    """Of the prompts that both have a verdict on; none if there are none."""
    shared = first.keys() & second.keys()
    if not shared:
        return None
    won = sum(second[key] and not first[key] for key in shared)
    lost = sum(first[key] and not second[key] for key in shared)
    n = len(shared)
    before, after = sum(first[key] for key in shared), sum(second[key] for key in shared)
    value = (after - before) / n
    low, high = _newcombe(before, n, after, n, _phi(before, after, lost, won, n))
    return Difference(value=value, low=low, high=high, chance=sign_test(won, lost), paired=True, prompts=n)


def unpaired(right: int, n: int, other: int, m: int) -> Difference:
    """Of `right` among `n` prompts and `other` among `m` others."""
    low, high = _newcombe(right, n, other, m, 0.0)
    chance = fisher(right, n, other, m)
    return Difference(value=other / m - right / n, low=low, high=high, chance=chance, paired=False, prompts=min(n, m))


def sign_test(won: int, lost: int) -> float:
    """McNemar's exact test: of the prompts on which two models differ, each wins half by chance."""
    n = won + lost
    tail = sum(math.comb(n, k) for k in range(min(won, lost) + 1)) / 2**n
    return min(1.0, float(2 * tail))


def fisher(right: int, n: int, other: int, m: int) -> float:
    """Fisher's exact test, two-sided: the chance of all tables with the same margins that are as unlikely."""
    total = right + other

    def weight(k: int) -> float:
        return _log_comb(n, k) + _log_comb(m, total - k) - _log_comb(n + m, total)

    seen = weight(right)
    found = (weight(k) for k in range(max(0, total - m), min(n, total) + 1))
    return min(1.0, math.fsum(math.exp(each) for each in found if each <= seen + 1e-9))


def _log_comb(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _newcombe(right: int, n: int, other: int, m: int, phi: float) -> tuple[float, float]:
    """The interval of the difference of two shares from their Wilson intervals; `phi` is their correlation."""
    p, q = right / n, other / m
    (low, high), (lower, upper) = wilson(right, n), wilson(other, m)
    below, above = (q - lower, high - p), (upper - q, p - low)

    def width(one: float, two: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * phi * one * two + two * two))

    return q - p - width(*below), q - p + width(*above)


def _phi(before: int, after: int, lost: int, won: int, n: int) -> float:
    """The correlation of two verdicts on the same prompts."""
    both, neither = before - lost, n - before - won
    scale = before * (n - before) * after * (n - after)
    return (both * neither - lost * won) / math.sqrt(scale) if scale else 0.0
