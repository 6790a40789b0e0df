"""Attention over a row in tiles (`tiles.py`), as plain matrix products.

While a tile's scores stay in the processor's cache, this is several times faster than torch's kernel for CPUs. What a
tile needs is gathered by tables that are made once for all layers. All tiles of a row are one operation with a backward
of its own, which keeps nothing but its arguments.

T tokens of the row; n stretches of a tile with L queries and S keys each, of which the last L are their own; H query
heads, K key and value heads, G = H/K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from stretto.kernels.cpu.tiles import Places, Tile
from stretto.models.logprob_head import accum_dtype

KEYS_AT_ONCE = 1 << 16
"""Keys of tiles whose gradients wait to be added up: the tiles of a long segment have far more than it has tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileIndex:
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
class GradientScatter:
    """How the gradients of some tiles' keys are added up."""

    tiles: slice
    """Which tiles these are."""
    known: Sequence[int]
    """How many keys each has."""
    order: Tensor
    """All of them but pads, by the row that they are."""
    starts: Tensor
    """(T*K + 1) where in `order` the keys of each row begin, and where the last ones end."""

    def of(self, rows: Tensor) -> Tensor:
        """Rows of the tiles' keys -> (T*K, D)."""
        return embedding_bag(self.order, rows, self.starts, mode="sum", include_last_offset=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileIndexes:
    """The indexes of all tiles."""

    tiles: Sequence[TileIndex]
    """Tile after tile."""
    back: Tensor
    """(T*K) which of all tiles' queries each row is."""
    sums: Sequence[GradientScatter]
    """Every tile is in one of them, in order."""

    @property
    def asked(self) -> list[int]:
        """How many queries each tile has."""
        return [len(each.asked) for each in self.tiles]

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows of all tiles' queries -> (T*K, ...)."""
        return rows.index_select(0, self.back)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledRow:
    """Attention over a row in tiles."""

    tiles: Sequence[Tile]
    """Every token is a query of one of them."""
    indexes: dict[int, TileIndexes] = field(default_factory=dict)
    """K -> the indexes, made once for layers alike."""
    masks: dict[int | None, Sequence[Tensor]] = field(default_factory=dict)
    """Window -> the mask of each tile, made likewise."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """(1, H, T, D), (1, K, T, D), (1, K, T, D) -> (1, H, T, D)."""
        heads = key.shape[1]
        if heads not in self.indexes:
            self.indexes[heads] = indexes_of(self.tiles, tokens=key.shape[2], heads=heads)
        if window not in self.masks:
            self.masks[window] = [tile.mask(window) for tile in self.tiles]
        indexes, masks = self.indexes[heads], self.masks[window]
        result: Tensor = _Attention.apply(query, key, value, indexes, masks, scale or query.shape[3] ** -0.5)
        return result


class _Attention(torch.autograd.Function):
    """(1, H, T, D) queries, (1, K, T, D) keys and values -> (1, H, T, D), tile by tile.

    The backward computes the weights again rather than keep them.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, indexes: TileIndexes, masks: Sequence[Tensor], scale: float
    ) -> Tensor:
        heads, size = key.shape[1], query.shape[3]
        queries, keys, values = rows_of(query * scale, heads), rows_of(key, heads), rows_of(value, heads)
        outputs = values.new_empty(sum(indexes.asked), query.shape[1] // heads * value.shape[3])
        for index, mask, part in zip(indexes.tiles, masks, outputs.split(indexes.asked), strict=True):
            weights = _weights(index.queries(queries, size), index.keys(keys), mask)
            torch.bmm(weights, index.keys(values), out=part.view(len(weights), -1, value.shape[3]))
        ctx.save_for_backward(query, key, value)
        ctx.indexes, ctx.masks, ctx.scale = indexes, masks, scale
        return states_of(indexes.gathered(outputs), query.shape[1], query.shape[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        indexes: TileIndexes = ctx.indexes
        heads, size = key.shape[1], query.shape[3]
        queries, keys, values = rows_of(query * ctx.scale, heads), rows_of(key, heads), rows_of(value, heads)
        outgoing = rows_of(gradients[0], heads)
        query_slopes = queries.new_empty(sum(indexes.asked), queries.shape[1])
        query_parts = query_slopes.split(indexes.asked)
        totals = [torch.zeros_like(rows, dtype=accum_dtype(rows.dtype)) for rows in (keys, values)]
        for sums in indexes.sums:
            slopes = [rows.new_empty(sum(sums.known), rows.shape[1]) for rows in (keys, values)]
            tiles = (each[sums.tiles] for each in (indexes.tiles, ctx.masks, query_parts))
            parts = (each.split(sums.known) for each in slopes)
            for index, mask, for_queries, for_keys, for_values in zip(*tiles, *parts, strict=True):
                asked, seen, told = index.queries(queries, size), index.keys(keys), index.keys(values)
                upper = index.queries(outgoing, told.shape[2])
                if index.used is not None:
                    upper.view(len(index.used), -1).mul_(index.used)
                weights = _weights(asked, seen, mask)
                torch.bmm(weights.transpose(1, 2), upper, out=for_values.view(told.shape))
                lower = torch.bmm(upper, told.transpose(1, 2))
                lower = torch._softmax_backward_data(lower, weights, -1, lower.dtype)
                torch.bmm(lower, seen, out=for_queries.view(asked.shape))
                torch.bmm(lower.transpose(1, 2), asked, out=for_keys.view(seen.shape))
            for total, each in zip(totals, slopes, strict=True):
                total += sums.of(each)
        key_total, value_total = totals
        return (
            states_of(indexes.gathered(query_slopes).mul_(ctx.scale), query.shape[1], query.shape[2]),
            states_of(key_total.to(key.dtype), heads, key.shape[2]),
            states_of(value_total.to(value.dtype), heads, value.shape[2]),
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


def indexes_of(tiles: Sequence[Tile], *, tokens: int, heads: int) -> TileIndexes:
    """The places of all tiles' queries and keys, with so many key heads."""
    indexes: list[TileIndex] = []
    back = np.empty(tokens * heads, np.int64)
    asks = 0
    for tile in tiles:
        asked, known = (_rows(places, heads) for places in (tile.asked, tile.known))
        there, spare = asked >= 0, asked[..., :1]
        indexes.append(
            TileIndex(
                stretches=len(asked) * heads,
                asked=torch.as_tensor(np.where(there, asked, spare).ravel()),
                known=torch.as_tensor(np.where(known < 0, spare, known).ravel()),
                used=None if there.all() else torch.as_tensor(there.reshape(-1, 1)),
            )
        )
        back[asked[there]] = asks + np.flatnonzero(there)
        asks += asked.size
    ends = np.cumsum([tile.known.size for tile in tiles]) // KEYS_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(ends)) + 1).tolist(), len(tiles)]
    return TileIndexes(
        tiles=indexes,
        back=torch.as_tensor(back),
        sums=[_sums(tiles, slice(*cut), rows=tokens * heads, heads=heads) for cut in pairwise(cuts)],
    )


def _sums(tiles: Sequence[Tile], chosen: slice, *, rows: int, heads: int) -> GradientScatter:
    """How the keys of some tiles are added up into so many rows."""
    known = [_rows(tile.known, heads).ravel() for tile in tiles[chosen]]
    owner = np.concatenate(known)
    there = np.flatnonzero(owner >= 0)
    ends = np.cumsum(np.bincount(owner[there], minlength=rows))
    return GradientScatter(
        tiles=chosen,
        known=[len(each) for each in known],
        order=torch.as_tensor(there[np.argsort(owner[there], kind="stable")]),
        starts=torch.as_tensor(np.append(0, ends)),
    )


def _rows(places: Places, heads: int) -> Places:
    """(n, any) places in the row -> (n, K, any) rows, token after token and head after head; pads stay below 0."""
    return places[:, None] * heads + np.arange(heads)[:, None]
