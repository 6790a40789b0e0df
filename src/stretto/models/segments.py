"""A row as a tree of segments: runs of tokens, each of which continues the path of its ancestors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
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


def positions_of(segments: Sequence[Segment], members: Sequence[int]) -> NDArray[np.int64]:
    """Positions of the tokens of some segments, each on its own branch."""
    firsts = [(reach_of(segments, index), segments[index].length) for index in members]
    return np.concatenate([np.arange(first, first + length) for first, length in firsts])


def kin_of(segments: Sequence[Segment], members: Sequence[int]) -> tuple[list[int], NDArray[np.bool_]]:
    """Ancestors of consecutive segments outside of these, and (queries, keys) True where a query may look.

    Queries are the tokens of the members, keys those of the ancestors and then those of the members.
    """
    outside = sorted({ancestor for member in members for ancestor in segments[member].ancestors} - set(members))
    path = np.zeros((len(segments), len(segments)), dtype=np.bool_)
    for member in members:
        path[member, [*segments[member].ancestors, member]] = True
    everyone = [*outside, *members]
    owner = np.repeat(everyone, [segments[index].length for index in everyone])
    position = positions_of(segments, everyone)
    own = sum(segments[member].length for member in members)
    visible = path[owner[-own:, None], owner[None, :]]
    visible &= position[-own:, None] >= position[None, :]
    return outside, visible


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
