"""Attention over a row in tiles: stretches of segments side by side and what they see, as plain matrix products.

Stretches that see about as much and are about equally long make a tile, whoever's they are: the answers of a group,
the prompts of all groups, pieces of a long segment. Each is padded to the longest, which costs less than products of
its own. A tile's scores stay in the processor's cache, where this is several times faster than torch's kernel for
CPUs. All tiles of a row are one operation with a backward of its own, which keeps nothing but its arguments.

T tokens of the row; n stretches of a tile with L queries and S keys each, of which the last L are their own; H query
heads, K key and value heads, G = H/K, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from stretto.train.segments import Segment, reach_of

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
class Stretch:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Where a tile's queries and keys are among (T*K) rows: token after token, and of each head after head."""

    stretches: int
    """n*K."""
    asked: Tensor
    """(n*K*L) the queries; pads repeat one."""
    known: Tensor
    """(n*K*S) the keys; pads repeat one."""
    used: Tensor | None
    """(n*K*L, 1) False for pads of `asked`; nothing if there are none."""

    def queries(self, rows: Tensor, size: int) -> Tensor:
        """(T*K, G*D) -> (n*K, L*G, D)."""
        return rows.index_select(0, self.asked).view(self.stretches, -1, size)

    def keys(self, rows: Tensor) -> Tensor:
        """(T*K, D) -> (n*K, S, D)."""
        return rows.index_select(0, self.known).view(self.stretches, -1, rows.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """The seats of all tiles."""

    seats: Sequence[Seats]
    """Tile after tile."""
    asked: Sequence[int]
    """How many queries each has."""
    known: Sequence[int]
    """How many keys."""
    back: Tensor
    """(T*K) which of all tiles' queries each row is."""
    order: Tensor
    """All tiles' keys but pads, by the row that they are."""
    starts: Tensor
    """(T*K + 1) where in `order` the keys of each row begin, and where the last ones end."""

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows of all tiles' queries -> (T*K, ...)."""
        return rows.index_select(0, self.back)

    def summed(self, rows: Tensor) -> Tensor:
        """Rows of all tiles' keys -> (T*K, D), added up."""
        return embedding_bag(self.order, rows, self.starts, mode="sum", include_last_offset=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A row in tiles."""

    tokens: int
    """T."""
    tiles: Sequence[Tile]
    """Every token is a query of one of them."""
    seatings: dict[int, Seating] = field(default_factory=dict)
    """K -> the seating, made once for layers alike."""
    masks: dict[int | None, Sequence[Tensor]] = field(default_factory=dict)
    """Window -> the mask of each tile, made likewise."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """(1, H, T, D), (1, K, T, D), (1, K, T, D) -> (1, H, T, D)."""
        heads = key.shape[1]
        if heads not in self.seatings:
            self.seatings[heads] = seating_of(self.tiles, tokens=self.tokens, heads=heads)
        if window not in self.masks:
            self.masks[window] = [tile.mask(window) for tile in self.tiles]
        seating, masks = self.seatings[heads], self.masks[window]
        result: Tensor = _Attention.apply(query, key, value, seating, masks, scale or query.shape[3] ** -0.5)
        return result


class _Attention(torch.autograd.Function):
    """(1, H, T, D) queries, (1, K, T, D) keys and values -> (1, H, T, D), tile by tile.

    The backward computes the weights again rather than keep them.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seating: Seating, masks: Sequence[Tensor], scale: float
    ) -> Tensor:
        heads, size = key.shape[1], query.shape[3]
        queries, keys, values = rows_of(query * scale, heads), rows_of(key, heads), rows_of(value, heads)
        outputs = values.new_empty(sum(seating.asked), query.shape[1] // heads * value.shape[3])
        for seats, mask, part in zip(seating.seats, masks, outputs.split(seating.asked), strict=True):
            weights = _weights(seats.queries(queries, size), seats.keys(keys), mask)
            torch.bmm(weights, seats.keys(values), out=part.view(len(weights), -1, value.shape[3]))
        ctx.save_for_backward(query, key, value)
        ctx.seating, ctx.masks, ctx.scale = seating, masks, scale
        return states_of(seating.gathered(outputs), query.shape[1], query.shape[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        seating: Seating = ctx.seating
        heads, size = key.shape[1], query.shape[3]
        queries, keys, values = rows_of(query * ctx.scale, heads), rows_of(key, heads), rows_of(value, heads)
        outgoing = rows_of(gradients[0], heads)
        query_slopes = queries.new_empty(sum(seating.asked), queries.shape[1])
        key_slopes, value_slopes = (rows.new_empty(sum(seating.known), rows.shape[1]) for rows in (keys, values))
        parts = (query_slopes.split(seating.asked), key_slopes.split(seating.known), value_slopes.split(seating.known))
        for seats, mask, for_queries, for_keys, for_values in zip(seating.seats, ctx.masks, *parts, strict=True):
            asked, seen, told = seats.queries(queries, size), seats.keys(keys), seats.keys(values)
            slopes = seats.queries(outgoing, told.shape[2])
            if seats.used is not None:
                slopes.view(len(seats.used), -1).mul_(seats.used)
            weights = _weights(asked, seen, mask)
            torch.bmm(weights.transpose(1, 2), slopes, out=for_values.view(told.shape))
            slopes = torch.bmm(slopes, told.transpose(1, 2))
            slopes = torch._softmax_backward_data(slopes, weights, -1, slopes.dtype)
            torch.bmm(slopes, seen, out=for_queries.view(asked.shape))
            torch.bmm(slopes.transpose(1, 2), asked, out=for_keys.view(seen.shape))
        return (
            states_of(seating.gathered(query_slopes).mul_(ctx.scale), query.shape[1], query.shape[2]),
            states_of(seating.summed(key_slopes), heads, key.shape[2]),
            states_of(seating.summed(value_slopes), heads, value.shape[2]),
            None,
            None,
            None,
        )


def rows_of(states: Tensor, heads: int) -> Tensor:
    """(1, any, T, D) -> (T*K, ...): every token's part of each of K heads."""
    return states[0].transpose(0, 1).reshape(states.shape[2] * heads, -1)


def states_of(rows: Tensor, heads: int, tokens: int) -> Tensor:
    """The other way."""
    return rows.view(tokens, heads, -1).transpose(0, 1)[None]


def _weights(queries: Tensor, keys: Tensor, hidden: Tensor) -> Tensor:
    """(n*K, L*G, D) scaled queries, (n*K, S, D) -> (n*K, L*G, S) attention weights.

    Kept in the type of the states: the kernels of softmax compute in the wide one inside, and what is twice as short
    passes through the cache twice as fast.
    """
    scores = torch.bmm(queries, keys.transpose(1, 2))
    stretches, length, hideable = hidden.shape
    each = scores.view(stretches, -1, length, scores.shape[1] // length, scores.shape[2])
    each[..., -hideable:].masked_fill_(hidden[:, None, :, None], float("-inf"))
    return scores.softmax(-1)


def seating_of(tiles: Sequence[Tile], *, tokens: int, heads: int) -> Seating:
    """Who stands where, with so many key heads."""
    head = np.arange(heads)[:, None]
    back = np.empty(tokens * heads, np.int64)
    seats: list[Seats] = []
    owners, sources = [], []
    asks = tells = 0
    for tile in tiles:
        there, told, spare = tile.asked >= 0, tile.known >= 0, tile.asked[:, :1]
        asked = np.where(there, tile.asked, spare)[:, None] * heads + head
        known = np.where(told, tile.known, spare)[:, None] * heads + head
        asking, telling = (np.repeat(each[:, None], heads, axis=1) for each in (there, told))
        seats.append(
            Seats(
                stretches=len(there) * heads,
                asked=torch.as_tensor(asked.ravel()),
                known=torch.as_tensor(known.ravel()),
                used=None if there.all() else torch.as_tensor(asking.reshape(-1, 1)),
            )
        )
        back[asked[asking]] = asks + np.flatnonzero(asking)
        owners.append(known[telling])
        sources.append(tells + np.flatnonzero(telling))
        asks, tells = asks + asked.size, tells + known.size
    owner = np.concatenate(owners)
    counts = np.bincount(owner, minlength=tokens * heads)
    return Seating(
        seats=seats,
        asked=[len(each.asked) for each in seats],
        known=[len(each.known) for each in seats],
        back=torch.as_tensor(back),
        order=torch.as_tensor(np.concatenate(sources)[np.argsort(owner, kind="stable")]),
        starts=torch.as_tensor(np.append(0, np.cumsum(counts))),
    )


def tiles_of(segments: Sequence[Segment]) -> Tiles | None:
    """A tree in the tiles that cost least; none if it is left to torch's kernel."""
    if any(reach_of(segments, index) + segment.length > FAR for index, segment in enumerate(segments)):
        return None
    stretches = [stretch for index in range(len(segments)) for stretch in _stretches(segments, index)]
    tokens = sum(segment.length for segment in segments)
    return Tiles(tokens=tokens, tiles=[_tile(batch) for batch in batches_of(stretches)])


def _stretches(segments: Sequence[Segment], index: int) -> Iterator[Stretch]:
    """A segment in as many as it takes."""
    segment = segments[index]
    path = [*(segments[ancestor] for ancestor in segment.ancestors), segment]
    branch = np.concatenate([np.arange(each.start, each.start + each.length) for each in path])
    first = len(branch) - segment.length
    while first < len(branch):
        # The largest L for which L * (first + L) is not more than there may be.
        rows = max(LEAST_ROWS, int((np.sqrt(first**2 + 4 * MOST_PAIRS) - first) / 2))
        yield Stretch(before=branch[:first], own=branch[first : first + rows])
        first += rows


def batches_of(stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Which of them to compute side by side."""
    left = sorted(stretches, key=lambda stretch: len(stretch.before))
    while left:
        most = len(left[0].before) * ALIKE + LEAST_ROWS
        kin = [stretch for stretch in left if len(stretch.before) <= most]
        left = left[len(kin) :]
        yield from _of_like_length(sorted(kin, key=lambda stretch: len(stretch.own)))


def _of_like_length(kin: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Cuts stretches, short ones first, where padding would cost more than another tile.

    Costs are pairs of tokens that are computed, and `PER_CALL` for each tile.
    """
    batch: list[Stretch] = []
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


def _tile(batch: Sequence[Stretch]) -> Tile:
    """Stretches as one tile."""
    reach, length = (max(map(len, parts)) for parts in zip(*((each.before, each.own) for each in batch), strict=True))
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
