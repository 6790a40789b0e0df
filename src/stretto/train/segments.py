"""A row as a tree of segments: runs of tokens, each of which continues the path of its ancestors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of consecutive tokens of the row that continues the path of its ancestors."""

    start: int
    """Where it begins in the row."""
    length: int
    """How many tokens it has."""
    ancestors: tuple[int, ...]
    """Indices of the segments before it on its path, root first; empty for a root."""


def reach_of(segments: Sequence[Segment], index: int) -> int:
    """Tokens of a segment's ancestors."""
    return sum(segments[ancestor].length for ancestor in segments[index].ancestors)


def spans_of(segments: Sequence[Segment], members: Sequence[int]) -> tuple[slice, ...]:
    """Where some segments stand in the row; those that follow each other are one span."""
    spans: list[slice] = []
    for segment in (segments[index] for index in members):
        stop = segment.start + segment.length
        if spans and spans[-1].stop == segment.start:
            spans[-1] = slice(spans[-1].start, stop)
        else:
            spans.append(slice(segment.start, stop))
    return tuple(spans)
