"""Shares of right answers: their intervals, pass@k, and what an evaluation has shown when some verdicts are missing.

A prompt without a verdict (a failure of ours) is neither right nor wrong. So an accuracy is over the prompts that have
one, its interval holds whatever the others may be, and whoever chooses between evaluations takes what each has shown
at least: a checkpoint must not be the best because its hardest prompts were not judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def wilson(right: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % score interval of a share. Wilson 1927."""
    if n == 0:
        return (0.0, 1.0)
    share = right / n
    center = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (0.0 if right == 0 else center - half, 1.0 if right == n else center + half)


def interval(right: int, n: int, asked: int) -> tuple[float, float]:
    """Wilson's, from its lower end if all prompts without a verdict were wrong to its upper end if all were right."""
    return wilson(right, asked)[0], wilson(right + asked - n, asked)[1]


def pass_at_k(right: int, n: int, k: int) -> float:
    """Chance that k of n samples, `right` of them right, hold a right one. Chen et al. 2021, eq. 1."""
    return 1.0 if n - right < k else 1.0 - math.comb(n - right, k) / math.comb(n, k)


def shown(metrics: Mapping[str, float], name: str) -> float | None:
    """A metric as checkpoints are compared by it: of an evaluation with missing verdicts what it has shown at least."""
    value, n, asked = metrics.get(name), metrics.get("eval/n"), metrics.get("eval/asked")
    if value is None or n is None or asked is None or n >= asked or "eval/accuracy" not in metrics:
        return value
    if math.isnan(metrics["eval/accuracy"]):
        return value
    right = round(metrics["eval/accuracy"] * n)
    low, high = wilson(right, round(asked))
    return {"eval/accuracy": right / asked, "eval/low": low, "eval/high": high}.get(name, value)
