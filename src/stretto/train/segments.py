"""A row as a tree of segments: runs of tokens, each of which continues the path of its ancestors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


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


class Cut:
    """(1, H, T, D) states cut once at the ends of all spans that will be asked for.

    A slice of a row has a gradient as long as the row, nearly all zeros; that of a part is as long as the part.
    """

    def __init__(self, states: Tensor, bounds: Sequence[int]) -> None:
        """`bounds` are sorted, from 0 to T."""
        sizes = [stop - start for start, stop in pairwise(bounds)]
        parts: Sequence[Tensor] = torch.split(states, sizes, dim=2)
        self.parts = parts
        self.places = {bound: place for place, bound in enumerate(bounds)}

    def __getitem__(self, span: slice) -> Tensor:
        """(1, H, tokens of the span, D)."""
        parts = self.parts[self.places[span.start] : self.places[span.stop]]
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def bounds_of(spans: Iterable[slice]) -> list[int]:
    """The ends of all spans, sorted."""
    return sorted({end for span in spans for end in (span.start, span.stop)})
