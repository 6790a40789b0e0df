"""A row in tiles: stretches of segments side by side, and what they see.

Stretches that see about as much and are about equally long make a tile, whoever's they are: the answers of a group,
the prompts of all groups, pieces of a long segment. Each is padded to the longest, which costs less than products of
its own. A tile's scores stay in the processor's cache. `tiled_attention.py` computes attention over them.

n stretches of a tile with L queries and S keys each, of which the last L are their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.models.segments import Segment, reach_of

PER_CALL = 4_000
"""What a tile costs beside its arithmetic, in pairs of tokens."""

MOST_PAIRS = 32_000
"""Pairs of tokens in a tile: beyond, their scores leave the processor's cache, and nothing is saved."""

LEAST_ROWS = 16
"""Queries in a stretch at least, however many keys they see."""

FAR = 4096
"""A row in which somebody sees more tokens than this is left to torch's kernel, which is as fast there."""

ALIKE = 1.25
"""Stretches of a tile may see before them up to this many times what the first of them sees, and `LEAST_ROWS` more."""

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryBlock:
    """Consecutive tokens of a segment; each sees what is before them on their branch, and them up to itself."""

    before: Places
    """Where in the row the tokens before them stand."""
    own: Places
    """Where they stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Stretches side by side. What they see ends with their own tokens, so what comes before begins with pads."""

    asked: Places
    """(n, L) where each query stands in the row; -1 for a pad."""
    known: Places
    """(n, S) where each key stands; -1 for a pad."""
    hidden: Tensor
    """(n or 1, L, C) True where a query must not look, of the last C keys."""

    def mask(self, window: int | None) -> Tensor:
        """`hidden`, and what is too far away as well."""
        if window is None:
            return self.hidden
        queries, keys = self.asked.shape[1], self.known.shape[1]
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        far = (distance >= window).repeat(len(self.hidden), 1, 1)
        far[..., -self.hidden.shape[2] :] |= self.hidden
        return far


def blocks_of(segments: Sequence[Segment]) -> tuple[QueryBlock, ...]:
    """A tree in stretches; none if it is left to torch's kernel."""
    if any(reach_of(segments, index) + segment.length > FAR for index, segment in enumerate(segments)):
        return ()
    return tuple(stretch for index in range(len(segments)) for stretch in _stretches(segments, index))


def tiles_of(stretches: Sequence[QueryBlock]) -> tuple[Tile, ...]:
    """Stretches in the tiles that cost least."""
    return tuple(_tile(batch) for batch in batches_of(stretches))


def _stretches(segments: Sequence[Segment], index: int) -> Iterator[QueryBlock]:
    """A segment in as many as it takes."""
    segment = segments[index]
    path = [*(segments[ancestor] for ancestor in segment.ancestors), segment]
    branch = np.concatenate([np.arange(each.start, each.start + each.length) for each in path])
    first = len(branch) - segment.length
    while first < len(branch):
        # The largest L for which L * (first + L) is not more than there may be.
        rows = max(LEAST_ROWS, int((np.sqrt(first**2 + 4 * MOST_PAIRS) - first) / 2))
        yield QueryBlock(before=branch[:first], own=branch[first : first + rows])
        first += rows


def batches_of(stretches: Sequence[QueryBlock]) -> Iterator[list[QueryBlock]]:
    """Which of them to compute side by side."""
    left = sorted(stretches, key=lambda stretch: len(stretch.before))
    while left:
        most = len(left[0].before) * ALIKE + LEAST_ROWS
        kin = [stretch for stretch in left if len(stretch.before) <= most]
        left = left[len(kin) :]
        yield from _of_like_length(sorted(kin, key=lambda stretch: len(stretch.own)))


def _of_like_length(kin: Sequence[QueryBlock]) -> Iterator[list[QueryBlock]]:
    """Cuts stretches, short ones first, where padding would cost more than another tile.

    Costs are pairs of tokens that are computed, and `PER_CALL` for each tile.
    """
    batch: list[QueryBlock] = []
    cost = reach = 0
    for stretch in kin:
        before, length = len(stretch.before), len(stretch.own)
        alone = length * (before + length)
        together = (len(batch) + 1) * length * (max(reach, before) + length)
        if batch and (together > cost + alone + PER_CALL or together > MOST_PAIRS):
            yield batch
            batch, cost, reach = [], alone, before
        else:
            cost, reach = together, max(reach, before)
        batch.append(stretch)
    if batch:
        yield batch


def _tile(batch: Sequence[QueryBlock]) -> Tile:
    """Stretches as one tile."""
    reach, length = max(len(each.before) for each in batch), max(len(each.own) for each in batch)
    asked = np.full((len(batch), length), -1)
    known = np.full((len(batch), reach + length), -1)
    for row, stretch in enumerate(batch):
        asked[row, : len(stretch.own)] = stretch.own
        known[row, reach - len(stretch.before) : reach] = stretch.before
        known[row, reach : reach + len(stretch.own)] = stretch.own
    hidden = torch.ones(1, length, length, dtype=torch.bool).triu(1)  # keys that come after the query
    if (known[:, :reach] < 0).any():
        pads = torch.as_tensor(known[:, None, :reach] < 0)
        hidden = torch.cat([side.expand(len(batch), length, -1) for side in (pads, hidden)], dim=2)
    return Tile(asked=asked, known=known, hidden=hidden)
