"""Keys and values of sequences that are being decoded, and the two layouts that read and write them.

A sequence lives in a slot; the first n slots are always the n active ones, so that a decode step works on plain
views. When a sequence ends, the last one moves into its place. Memory is taken as needed and kept until `clear`.

S slots, K key and value heads, L tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stretto.train.attention import TreeLayout

GRAIN = 64
"""Capacities are multiples of this many tokens."""


class KeyValueCache:
    """(S, K, L, D) keys and values per layer."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.slots = 0
        self.capacity = 0

    def shape_with(self, *, slots: int, tokens: int) -> tuple[int, int]:
        """(slots, capacity) once there is room for so many sequences of so many tokens beside what is there."""
        return max(slots, self.slots), max(-(-tokens // GRAIN) * GRAIN, self.capacity)

    def reserve(self, *, slots: int, tokens: int) -> None:
        """Makes room for so many sequences of so many tokens, keeping what is there."""
        shape = self.shape_with(slots=slots, tokens=tokens)
        if shape == (self.slots, self.capacity):
            return
        self.slots, self.capacity = shape
        for states in (self.keys, self.values):
            for layer, old in states.items():
                states[layer] = self._room(old.shape[1], old.shape[3], old)
                states[layer][: old.shape[0], :, : old.shape[2]] = old

    def at(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values; memory is taken when the first ones arrive and their sizes are known."""
        if layer not in self.keys:
            self.keys[layer] = self._room(key.shape[1], key.shape[3], key)
            self.values[layer] = self._room(value.shape[1], value.shape[3], value)
        return self.keys[layer], self.values[layer]

    def move(self, *, source: int, target: int, tokens: int) -> None:
        """Copies a sequence into another slot."""
        for states in (self.keys, self.values):
            for layer in states.values():
                layer[target, :, :tokens] = layer[source, :, :tokens]

    def clear(self) -> None:
        """Gives the memory back."""
        self.keys.clear()
        self.values.clear()
        self.slots = self.capacity = 0

    def _room(self, heads: int, size: int, like: Tensor) -> Tensor:
        return torch.zeros(self.slots, heads, self.capacity, size, dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLayout:
    """Attention of new contexts over themselves, which also fills their slots."""

    tree: TreeLayout
    """The contexts as a packed tree: what they share is computed once."""
    places: Sequence[Tensor]
    """Per context, where each of its tokens stands in the row."""
    first_slot: int
    """The first context's slot; the others follow."""
    cache: KeyValueCache
    """Where keys and values go."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(1, H, T, D) as `TreeLayout.attend`."""
        keys, values = self.cache.at(layer, key, value)
        for slot, places in enumerate(self.places, self.first_slot):
            keys[slot, :, : len(places)] = key[0].index_select(1, places)
            values[slot, :, : len(places)] = value[0].index_select(1, places)
        return self.tree.attend(layer, query, key, value, scale=scale, window=window)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """Attention of one new token per active sequence over everything that came before it."""

    lengths: Tensor
    """(n) tokens of each sequence, the new one included."""
    longest: int
    """The largest of them."""
    cache: KeyValueCache
    """Slots 0 to n-1 are the active sequences."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(1, H, n, D): the row holds one token of each sequence."""
        keys, values = self.cache.at(layer, key, value)
        active = len(self.lengths)
        slots = torch.arange(active, device=query.device)
        keys[slots, :, self.lengths - 1] = key[0].transpose(0, 1)
        values[slots, :, self.lengths - 1] = value[0].transpose(0, 1)
        place = torch.arange(self.longest, device=query.device)[None]
        visible = place < self.lengths[:, None]
        if window is not None:
            visible &= place >= self.lengths[:, None] - window
        output = scaled_dot_product_attention(
            query[0].transpose(0, 1)[:, :, None],
            keys[:active, :, : self.longest],
            values[:active, :, : self.longest],
            attn_mask=visible[:, None, None],
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output[:, :, 0].transpose(0, 1)[None]
