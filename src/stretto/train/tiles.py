"""Attention over a row in tiles: a few queries and the keys that they may see, as plain matrix products.

A tile's scores stay in the processor's cache, where this is several times faster than torch's kernel for CPUs. There
are three kinds: a stretch of one segment; siblings, segments with the same ancestors and about the same length, side by
side, because in one attention nearly every pair of their tokens would be masked; and small segments of any other kin
under a mask. All tiles of a row are one operation with a backward of its own, which keeps nothing but its
arguments. Used on CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.train.head import wide
from stretto.train.segments import Segment, kin_of, positions_of, reach_of, spans_of

PER_CALL = 4_000
"""What a tile costs beside its arithmetic, in pairs of tokens."""

MOST_PAIRS = 32_000
"""Pairs of tokens in a tile: beyond, their scores leave the processor's cache, and nothing is saved."""

LEAST_ROWS = 16
"""Queries in a tile at least, however many keys they see."""

FAR = 4096
"""A row in which somebody sees more tokens than this is left to torch's kernel, which is as fast there."""

TOGETHER = 256
"""Small segments that are no siblings share a mask up to this many tokens: each would cost calls of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Some queries of a row and what they see."""

    queries: slice
    """Where the queries stand in the row."""
    spans: tuple[slice, ...]
    """Where the keys stand that all of them may see; without siblings, their own as well."""
    hidden: Tensor
    """(L, C) True where a query must not look, of the last C keys."""
    asked: Tensor
    """(L) positions of the queries on their branch."""
    known: Tensor
    """(S) positions of the keys, for sliding windows."""
    family: Family | None = None
    """How siblings stand side by side."""

    def mask(self, window: int | None) -> Tensor:
        """(L, C) `hidden`, and what is too far away as well."""
        if window is None:
            return self.hidden
        far = self.asked[:, None] - self.known >= window
        far[:, -self.hidden.shape[1] :] |= self.hidden
        return far

    def rows(self, states: Tensor) -> Tensor:
        """(1, H, T, D) -> (n, H, L, D) of the queries."""
        own = states[:, :, self.queries]
        return own if self.family is None else self.family.spread(own)

    def reach(self, states: Tensor) -> Tensor:
        """(1, K, T, D) -> (n, K, S, D) of the keys."""
        parts = [states[:, :, span] for span in self.spans]
        if self.family is not None:
            own = self.family.spread(states[:, :, self.queries])
            parts = [*(part.expand(len(own), -1, -1, -1) for part in parts), own]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def put(self, rows: Tensor, into: Tensor) -> None:
        """(n, H, L, D) of the queries to their places in (1, H, T, D)."""
        into[:, :, self.queries] = rows if self.family is None else self.family.gather(rows)

    def add(self, rows: Tensor, into: Tensor) -> None:
        """(n, K, S, D) of the keys, added at their places in (1, K, T, D)."""
        start = 0
        for span in self.spans:
            stop = start + span.stop - span.start
            into[:, :, span] += rows[:, :, start:stop].sum(0, keepdim=True) if len(rows) > 1 else rows[:, :, start:stop]
            start = stop
        if self.family is not None:
            into[:, :, self.queries] += self.family.gather(rows[:, :, start:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Siblings side by side, each padded to the longest."""

    count: int
    """n."""
    there: Tensor
    """(n * L) for each place of the batch a token of theirs, counted from the first; pads repeat one."""
    back: Tensor
    """(tokens) where each token stands in the batch."""
    used: Tensor
    """(n, 1, L, 1) 0 for pads, else 1."""

    def spread(self, states: Tensor) -> Tensor:
        """(1, H, tokens, D) -> (n, H, L, D)."""
        heads, _, size = states.shape[1:]
        return states[0].index_select(1, self.there).view(heads, self.count, -1, size).transpose(0, 1)

    def gather(self, rows: Tensor) -> Tensor:
        """(n, H, L, D) -> (1, H, tokens, D)."""
        return rows.transpose(0, 1).flatten(1, 2).index_select(1, self.back)[None]


class _Attention(torch.autograd.Function):
    """(1, H, T, D) queries, (1, K, T, D) keys and values -> (1, H, T, D), tile by tile.

    The backward computes the weights again rather than keep them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: Sequence[Tile],
        masks: Sequence[Tensor],
        scale: float,
    ) -> Tensor:
        heads, tokens, size = query.shape[1], query.shape[2], value.shape[3]
        output = query.new_empty(1, tokens, heads, size).transpose(1, 2)
        scaled = query * scale
        for tile, mask in zip(tiles, masks, strict=True):
            asked, told = tile.rows(scaled), tile.reach(value)
            weights = _weights(asked, tile.reach(key), mask)
            tile.put(torch.matmul(weights, told).view(*asked.shape[:3], size), output)
        ctx.save_for_backward(query, key, value)
        ctx.tiles, ctx.masks, ctx.scale = tiles, masks, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        scaled, query_gradient = query * ctx.scale, torch.empty_like(query)
        key_gradient, value_gradient = (torch.zeros_like(states, dtype=wide(states.dtype)) for states in (key, value))
        for tile, mask in zip(ctx.tiles, ctx.masks, strict=True):
            asked, seen, told, outgoing = tile.rows(scaled), tile.reach(key), tile.reach(value), tile.rows(gradients[0])
            if tile.family is not None:
                outgoing = outgoing * tile.family.used.to(outgoing.dtype)
            heads = (*seen.shape[:2], -1)
            outgoing = outgoing.reshape(*heads, told.shape[3])
            weights = _weights(asked, seen, mask)
            slopes = torch.matmul(outgoing, told.transpose(2, 3))
            slopes = torch._softmax_backward_data(slopes, weights, -1, slopes.dtype)
            tile.put(torch.matmul(slopes, seen).view(asked.shape), query_gradient)
            tile.add(torch.matmul(slopes.transpose(2, 3), asked.reshape(*heads, asked.shape[3])), key_gradient)
            tile.add(torch.matmul(weights.transpose(2, 3), outgoing), value_gradient)
        query_gradient *= ctx.scale
        return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype), None, None, None


def _weights(query: Tensor, key: Tensor, hidden: Tensor) -> Tensor:
    """(n, K, H/K * L, S) attention weights of scaled queries.

    Kept in the type of the states: the kernels of softmax compute in the wide one inside, and what is twice as short
    passes through the cache twice as fast.
    """
    n, heads = key.shape[:2]
    scores = torch.matmul(query.reshape(n, heads, -1, query.shape[3]), key.transpose(2, 3))
    each = scores.view(n, heads, -1, query.shape[2], key.shape[2])
    each[..., -hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)


def attend_in_tiles(
    tiles: Sequence[Tile], query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
) -> Tensor:
    """(1, H, T, D), (1, K, T, D), (1, K, T, D) -> (1, H, T, D)."""
    masks = [tile.mask(window) for tile in tiles]
    result: Tensor = _Attention.apply(query, key, value, tiles, masks, scale or query.shape[3] ** -0.5)
    return result


def tiles_of(segments: Sequence[Segment]) -> tuple[Tile, ...]:
    """A tree in the tiles that cost least; none if it is left to torch's kernel."""
    if any(reach_of(segments, index) + segment.length > FAR for index, segment in enumerate(segments)):
        return ()
    return tuple(_tiles(segments))


def _tiles(segments: Sequence[Segment]) -> Iterator[Tile]:
    plain: list[int] = []
    for _, run in groupby(range(len(segments)), key=lambda index: segments[index].ancestors):
        members = list(run)
        batches = batches_of([segments[index] for index in members], ancestors=reach_of(segments, members[0]))
        if batches:
            yield from _others(segments, plain)
            plain = []
            for batch in batches:
                yield from _side_by_side(segments, members[batch])
        else:
            plain += members
    yield from _others(segments, plain)


def batches_of(run: Sequence[Segment], *, ancestors: int) -> list[slice]:
    """How to cut siblings into batches of about equal lengths; nothing if masks over all of them cost less.

    Costs are pairs of tokens that are computed, and `PER_CALL` for each tile.
    """
    if len(run) < 2:
        return []
    lengths = [segment.length for segment in run]
    batches = [slice(0, 0)]
    cost = 0
    for index, length in enumerate(lengths):
        first = batches[-1].start
        longest = max(lengths[first : index + 1])
        together = (index + 1 - first) * longest * (ancestors + longest)
        alone = length * (ancestors + length)
        if index > first and (together > cost + alone + PER_CALL or together > MOST_PAIRS):
            batches.append(slice(index, index + 1))
            cost = alone
        else:
            batches[-1], cost = slice(first, index + 1), together
    padded = [(part.stop - part.start, max(lengths[part])) for part in batches]
    apart = sum(count * longest * (ancestors + longest) + PER_CALL for count, longest in padded)
    total = sum(lengths)
    return batches if apart < total * (ancestors + min(total, TOGETHER)) else []


def _side_by_side(segments: Sequence[Segment], members: Sequence[int]) -> Iterator[Tile]:
    """Siblings as one tile, or one segment in as many as it takes."""
    if len(members) == 1:
        yield from _alone(segments, members[0])
        return
    lengths = np.array([segments[index].length for index in members])
    longest, starts = int(lengths.max()), np.cumsum(lengths) - lengths
    inside = np.arange(longest)[None] < lengths[:, None]
    first, ancestors = segments[members[0]], reach_of(segments, members[0])
    known = torch.arange(ancestors + longest)
    yield Tile(
        queries=slice(first.start, first.start + int(lengths.sum())),
        spans=spans_of(segments, first.ancestors),
        hidden=_later(longest),
        asked=known[ancestors:],
        known=known,
        family=Family(
            count=len(members),
            there=torch.as_tensor(np.where(inside, starts[:, None] + np.arange(longest), 0).ravel()),
            back=torch.as_tensor(np.flatnonzero(inside)),
            used=torch.as_tensor(inside)[:, None, :, None],
        ),
    )


def _others(segments: Sequence[Segment], plain: Sequence[int]) -> Iterator[Tile]:
    """Segments that follow each other: small ones under a mask, together up to `TOGETHER` tokens."""
    groups: list[list[int]] = []
    size = 0
    for index in plain:
        size += segments[index].length
        if not groups or size > TOGETHER:
            groups.append([])
            size = segments[index].length
        groups[-1].append(index)
    for members in groups:
        yield from _alone(segments, members[0]) if len(members) == 1 else _masked(segments, members)


def _alone(segments: Sequence[Segment], index: int) -> Iterator[Tile]:
    """One segment in stretches."""
    segment, ancestors = segments[index], reach_of(segments, index)
    before = spans_of(segments, segment.ancestors)
    for first, stop in _stretches(segment.length, ancestors):
        own = slice(segment.start, segment.start + stop)
        known = torch.arange(ancestors + stop)
        yield Tile(
            queries=slice(segment.start + first, segment.start + stop),
            spans=_joined(before, own),
            hidden=_later(stop - first),
            asked=known[ancestors + first :],
            known=known,
        )


def _masked(segments: Sequence[Segment], members: Sequence[int]) -> Iterator[Tile]:
    """Consecutive segments of any kin, in stretches."""
    outside, visible = kin_of(segments, members)
    start, length = segments[members[0]].start, visible.shape[0]
    known = torch.as_tensor(positions_of(segments, [*outside, *members]))
    ancestors, before = len(known) - length, spans_of(segments, outside)
    for first, stop in _stretches(length, ancestors):
        keys = ancestors + stop
        yield Tile(
            queries=slice(start + first, start + stop),
            spans=_joined(before, slice(start, start + stop)),
            hidden=torch.as_tensor(~visible[first:stop, :keys]),
            asked=known[ancestors + first : keys],
            known=known[:keys],
        )


def _stretches(length: int, ancestors: int) -> Iterator[tuple[int, int]]:
    """From where to where tiles go in a segment that has so many tokens before it."""
    first = 0
    while first < length:
        reach = ancestors + first
        # The largest L for which L * (reach + L) is not more than there may be.
        rows = max(LEAST_ROWS, int((np.sqrt(reach**2 + 4 * MOST_PAIRS) - reach) / 2))
        yield first, min(length, first + rows)
        first += rows


def _joined(before: tuple[slice, ...], own: slice) -> tuple[slice, ...]:
    """Spans and one more, as one where they touch."""
    if before and before[-1].stop == own.start:
        return (*before[:-1], slice(before[-1].start, own.stop))
    return (*before, own)


def _later(length: int) -> Tensor:
    """(length, length) True where a key comes after the query."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)
