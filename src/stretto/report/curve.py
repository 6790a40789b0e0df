"""A curve in a few lines of text, for terminals and logs. It draws; it knows nothing of what the numbers mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"
"""Marks for a character cell, from empty to full."""

ASCII = " .:#"
"""The same for streams that cannot encode blocks."""


def curve(values: Sequence[float], width: int, height: int, marks: str = BLOCKS) -> str:
    """Bars of `height` lines over `width` columns, with the largest and the smallest value at the left.

    More values than columns are averaged, fewer are stretched; values that are not finite are left out; without any
    value the answer is empty.
    """
    points = _resample([value for value in values if math.isfinite(value)], width)
    if not points:
        return ""
    low, high = least, most = min(points), max(points)
    full = len(marks) - 1
    span = high - low
    if not math.isfinite(span):  # halves of what is too far apart for a float are not
        points, low, high = [point / 2 for point in points], low / 2, high / 2
        span = high - low
    levels = [1 + round((point - low) / span * (height * full - 1)) if span else 1 for point in points]
    labels = {0: f"{least:.3g}"} | ({height - 1: f"{most:.3g}"} if most > least else {})
    margin = max(map(len, labels.values()))
    rows = []
    for row in reversed(range(height)):
        bars = "".join(marks[min(max(level - row * full, 0), full)] for level in levels)
        rows.append(f"{labels.get(row, ''):>{margin}} | {bars}".rstrip())
    return "\n".join(rows)


def _resample(values: Sequence[float], width: int) -> list[float]:
    """`width` values for as many columns."""
    if not values:
        return []
    count = len(values)
    edges = [column * count // width for column in range(width + 1)]
    bins = [values[left : max(right, left + 1)] for left, right in pairwise(edges)]
    return [_mean(found) for found in bins]


def _mean(values: Sequence[float]) -> float:
    """The mean of some numbers, also where their sum is too large for a float."""
    mean = sum(values) / len(values)
    if math.isfinite(mean):
        return mean
    return min(max(sum(value / len(values) for value in values), min(values)), max(values))
