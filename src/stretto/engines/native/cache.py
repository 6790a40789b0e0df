"""Keys and values of sequences that are being decoded.

A sequence lives in a slot; the first n slots are always the n active ones, so that a decode step works on plain
views. When a sequence ends, the last one moves into its place. What several sequences begin with, the prompt of a
group, stands once, in a cache of prefixes, and their slots hold only what came after it; they close their gaps alike.
Memory is taken as needed and kept until `clear`.

n sequences of w tokens each, H query heads, K key and value heads, G = H / K, L tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto import host_memory
from stretto.engines.native.admission import in_grains
from stretto.models.latent_attention import latent_of
from stretto.models.load import Policy


class KeyValueCache:
    """(S, K, L, D) keys and values per layer."""

    def __init__(self, latent: int = 0) -> None:
        """So many numbers of a key, its first, are its value; 0 where values are others (`models.latent_attention`)."""
        self.latent = latent
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.slots = 0
        self.capacity = 0

    def shape_with(self, *, slots: int, tokens: int) -> tuple[int, int]:
        """(slots, capacity) once there is room for so many sequences of so many tokens beside what is there."""
        return max(slots, self.slots), max(in_grains(tokens), self.capacity)

    @property
    def taken(self) -> tuple[int, int]:
        """(slots, capacity) that memory is taken for."""
        return self.slots, self.capacity

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
            if not self.latent:
                self.values[layer] = self._room(value.shape[1], value.shape[3], value)
        return self.of_layer(layer)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values that are there."""
        keys = self.keys[layer]
        return keys, keys[..., : self.latent] if self.latent else self.values[layer]

    def put(self, layer: int, spots: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes (N, D) keys and values to rows of the flattened cache."""
        for states, new in ((self.keys, key), (self.values, value)):
            if layer in states:
                states[layer].view(-1, new.shape[1]).index_copy_(0, spots, new)

    def move(self, *, source: int, target: int, tokens: int) -> None:
        """Copies a sequence into another slot."""
        for states in (self.keys, self.values):
            for layer in states.values():
                layer[target, :, :tokens].copy_(layer[source, :, :tokens])

    def clear(self) -> None:
        """Gives the memory back."""
        self.keys.clear()
        self.values.clear()
        self.slots = self.capacity = 0

    def _room(self, heads: int, size: int, like: Tensor) -> Tensor:
        slots, capacity = self.taken
        return torch.zeros(slots, heads, capacity, size, dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """The shared beginnings that are in use, and who continues them."""

    cache: KeyValueCache
    """Where their keys and values are, in the first t slots."""
    longest: int
    """Tokens of the longest."""
    members: Tensor
    """(t, m) the sequences that continue each; the places of those that are fewer repeat any sequence."""
    index: Tensor
    """(n) where among the flattened members a sequence is; 0 for one without a prefix."""
    shares: Tensor
    """(n, 1, 1, 1) False for those."""

    @classmethod
    def of(cls, prefixes: Tensor, bases: Tensor, cache: KeyValueCache) -> SharedPrefixes | None:
        """Who shares what, from (n) slots in their `cache` (-1 for none) and (n) lengths; none if nobody does."""
        slots = prefixes.tolist()
        members: list[list[int]] = [[] for _ in range(max(slots) + 1)]
        index = [0] * len(slots)
        for row, slot in enumerate(slots):
            if slot >= 0:
                members[slot].append(row)
        if not members:
            return None
        most, device = max(map(len, members)), prefixes.device
        for slot, rows in enumerate(members):
            for place, row in enumerate(rows):
                index[row] = slot * most + place
        return cls(
            cache=cache,
            longest=int(bases.max()),
            members=torch.tensor([rows + [0] * (most - len(rows)) for rows in members], device=device),
            index=torch.tensor(index, device=device),
            shares=(prefixes >= 0)[:, None, None, None],
        )

    def tables(self, heads: int) -> tuple[Tensor, Tensor]:
        """(t*K*m) rows of the flattened queries, prefix after prefix, and (n*K) where each row has gone."""
        head = torch.arange(heads, device=self.index.device)
        prefix, place = self.index // self.members.shape[1], self.index % self.members.shape[1]
        entered = self.members[:, None] * heads + head[:, None]
        left = (prefix[:, None] * heads + head) * self.members.shape[1] + place[:, None]
        return entered.view(-1), left.view(-1)

    def at(self, layer: int) -> tuple[Tensor, Tensor]:
        """(t, K, longest, D) keys and values of a layer."""
        keys, values = (each[: len(self.members), :, : self.longest] for each in self.cache.of_layer(layer))
        return keys, values

    def scores(self, layer: int, queries: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """(n, K, w*G, D) queries -> (n, K, w*G, longest) products with the keys of each one's prefix."""
        keys, _ = self.at(layer)
        return self._beside(queries, keys.to(queries.dtype).transpose(-1, -2), tables)

    def mix(self, layer: int, weights: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """(n, K, w*G, longest) weights -> (n, K, w*G, D) sums of the prefix's values."""
        _, values = self.at(layer)
        return self._beside(weights.to(values.dtype), values, tables).mul_(self.shares)

    def _beside(self, rows: Tensor, states: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """(n, K, q, x) times (t, K, x, y) -> (n, K, q, y): the members of a prefix are one matrix product."""
        return self.left(torch.matmul(self.entered(rows, tables), states), rows, tables)

    def entered(self, rows: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """(n, K, q, x) -> (t, K, m*q, x): members side by side."""
        n, heads, _, size = rows.shape
        chosen = rows.reshape(n * heads, -1).index_select(0, tables[0])
        return chosen.view(len(self.members), heads, -1, size)

    def left(self, found: Tensor, rows: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """(t, K, m*q, y) -> (n, K, q, y): what was found for `rows`, sequence after sequence."""
        n, heads, asked, _ = rows.shape
        return found.reshape(-1, asked * found.shape[3]).index_select(0, tables[1]).view(n, heads, asked, -1)


def cache_tokens(policy: Policy, share: float) -> int:
    """How many tokens of keys and values fit into a share of the device's memory.

    Of all its memory, not of what happens to be free: what is admitted together must not differ from run to run.
    """
    return max(1, int(memory_of(policy.device) * share / token_bytes(policy)))


def token_bytes(policy: Policy, ranks: int = 1) -> int:
    """Bytes that the keys and values of one token take on one of several ranks that share heads."""
    config = policy.network.config.get_text_config()
    if latent := latent_of(policy.network):
        return int(config.num_hidden_layers * (latent + config.qk_rope_head_dim) * policy.dtype.itemsize)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * -(-heads // ranks) * size * policy.dtype.itemsize)


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return host_memory.total()
