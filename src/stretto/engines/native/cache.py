"""Keys and values of sequences that are being decoded, and the layout that reads and writes them.

A sequence lives in a slot; the first n slots are always the n active ones, so that a decode step works on plain
views. When a sequence ends, the last one moves into its place. What several sequences begin with, the prompt of a
group, stands once, in a cache of prefixes, and their slots hold only what came after it; they close their gaps alike.
Memory is taken as needed and kept until `clear`.

n sequences of w tokens each, H query heads, K key and value heads, G = H / K, L tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from stretto import host_memory
from stretto.engines.native.admission import in_grains
from stretto.models.latent_attention import latent_of
from stretto.models.load import Policy
from stretto.models.logprob_head import accum_dtype


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
                layer[target, :, :tokens] = layer[source, :, :tokens]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """Attention of the newest tokens of every active sequence over everything that came before them."""

    lengths: Tensor
    """(n) tokens of each sequence that are in the cache already, prefix included."""
    bases: Tensor
    """(n) how many of them stand in its prefix; 0 without one."""
    width: int
    """New tokens per sequence."""
    longest: int
    """Most own tokens of a sequence, the new ones included."""
    cache: KeyValueCache
    """Slots 0 to n-1 are the active sequences."""
    prefixes: SharedPrefixes | None
    """What they share, if anything."""
    hidden: dict[int | None, Tensor] = field(default_factory=dict)
    """Window -> (n, 1, w, 1, keys), made once for all layers: True where a token may not look."""
    biases: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)
    """(window, w*G) -> (n, 1, w*G, keys) the same as something to add to scores; made once for layers alike."""
    prefix_biases: dict[tuple[int | None, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Likewise, what `_prefix_bias` makes of it."""
    spots: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """(K, capacity) -> (n*w*K) rows of the flattened cache that the new tokens take; made once for layers alike."""
    tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """K -> the prefixes' tables, made once for layers alike."""
    decodes: bool = True
    """Its queries look at what was kept before."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(1, H, n*w, D): the row holds the new tokens sequence after sequence."""
        self.keep(layer, key, value)
        return self.look(layer, query, key, value, scale=scale, window=window)

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Writes the new tokens' keys and values into the sequences' slots."""
        keys, _ = self.cache.at(layer, key, value)
        rows = (each[0].transpose(0, 1).reshape(-1, each.shape[3]) for each in (key, value))
        self.cache.put(layer, self._spots(key.shape[1], keys.shape[2]), *rows)

    def look(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention over all that is kept, of these sizes."""
        keys, values = self.cache.of_layer(layer)
        n, width, heads, size = len(self.lengths), self.width, key.shape[1], query.shape[3]
        apart = query[0].transpose(0, 1).reshape(n, width, heads, -1, size).transpose(1, 2)  # (n, K, w, G, D)
        queries = apart.reshape(n, heads, -1, size)
        alike = values.shape[3] == size and query.dtype == keys.dtype == values.dtype
        if keys.device.type == "cpu" and alike:
            output = self._by_kernel(layer, queries, keys, values, scale=scale, window=window)
        else:
            scaled = queries.to(accum_dtype(query.dtype)) * (size**-0.5 if scale is None else scale)
            output = self._in_parts(layer, scaled, keys, values, window)
        output = output.to(value.dtype).view(*apart.shape[:4], value.shape[3]).transpose(1, 2)
        # In memory token after token, as the layer that follows reads it.
        return output.reshape(n * width, -1, value.shape[3]).transpose(0, 1)[None]

    def _by_kernel(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(n, K, w*G, D) queries -> (n, K, w*G, D): a kernel over the sequences' own keys and one over their prefixes'.

        Each also tells the logarithm of what its weights add up to, by which the two are mixed.
        """
        n, heads = queries.shape[:2]
        kernel = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, scale=scale)
        bias, prefixes = self._bias(window, queries), self.prefixes
        shared = bias.shape[-1] - self.longest
        keys, values = keys[:n, :, : self.longest], values[:n, :, : self.longest]
        output: Tensor
        output, total = kernel(queries, keys, values, attn_mask=bias[..., shared:])
        if prefixes is None:
            return output
        tables, (prefix_bias, sees) = self._tables(prefixes, heads), self._prefix_bias(window, queries)
        found, beside = kernel(prefixes.entered(queries, tables), *prefixes.at(layer), attn_mask=prefix_bias)
        found, beside = (prefixes.left(each, queries, tables) for each in (found, beside[..., None]))
        share = (beside - total[..., None]).sigmoid_().masked_fill_(~sees, 0)
        return output.to(share.dtype).lerp_(found.to(share.dtype), share)

    def _in_parts(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """(n, K, w*G, D) scaled queries -> (n, K, w*G, D): over the prefixes' keys and the sequences' own."""
        n, heads = queries.shape[:2]
        own = keys[:n, :, : self.longest].to(queries.dtype)
        scores = torch.matmul(queries, own.transpose(-1, -2))
        if self.prefixes is not None:
            tables = self._tables(self.prefixes, heads)
            scores = torch.cat([self.prefixes.scores(layer, queries, tables), scores], dim=-1)
        scores = scores.view(n, heads, self.width, -1, scores.shape[-1]).masked_fill_(self._mask(window), float("-inf"))
        weights = scores.softmax(-1).view(n, heads, -1, scores.shape[-1])
        shared = weights.shape[-1] - self.longest
        output = torch.matmul(weights[..., shared:].to(values.dtype), values[:n, :, : self.longest])
        if self.prefixes is not None:
            output += self.prefixes.mix(layer, weights[..., :shared], tables)
        return output

    def _tables(self, prefixes: SharedPrefixes, heads: int) -> tuple[Tensor, Tensor]:
        if heads not in self.tables:
            self.tables[heads] = prefixes.tables(heads)
        return self.tables[heads]

    def _spots(self, heads: int, capacity: int) -> Tensor:
        """Token after token, the places of its heads."""
        if (heads, capacity) not in self.spots:
            device = self.lengths.device
            slots = torch.arange(len(self.lengths), device=device)[:, None, None] * heads
            places = (self.lengths - self.bases)[:, None] + torch.arange(self.width, device=device)
            spots = (slots + torch.arange(heads, device=device)) * capacity + places[..., None]
            self.spots[heads, capacity] = spots.view(-1)
        return self.spots[heads, capacity]

    def _bias(self, window: int | None, queries: Tensor) -> Tensor:
        """(n, 1, w*G, keys) what is added to scores."""
        asked = queries.shape[2]
        if (window, asked) not in self.biases:
            hidden = self._mask(window)[:, :, :, 0]
            bias = torch.zeros(hidden.shape, dtype=queries.dtype).masked_fill_(hidden, float("-inf"))
            self.biases[window, asked] = bias.repeat_interleave(asked // self.width, dim=2)
        return self.biases[window, asked]

    def _prefix_bias(self, window: int | None, queries: Tensor) -> tuple[Tensor, Tensor]:
        """(t, 1, m*w*G, longest) the part of it that is about prefixes, for their members one after the other, and
        (n, 1, w*G, 1) whether a query sees anything there."""
        assert self.prefixes is not None
        asked, members = queries.shape[2], self.prefixes.members
        if (window, asked) not in self.prefix_biases:
            bias = self._bias(window, queries)[..., : self.prefixes.longest]
            chosen = bias[members, 0].reshape(len(members), 1, -1, self.prefixes.longest)
            self.prefix_biases[window, asked] = (chosen, (bias == 0).any(-1, keepdim=True))
        return self.prefix_biases[window, asked]

    def _mask(self, window: int | None) -> Tensor:
        """What each does not see: it sees of the prefix its own length, of the slot everything up to itself."""
        if window not in self.hidden:
            device, base = self.lengths.device, self.bases[:, None, None]
            prefix = torch.arange(self.prefixes.longest if self.prefixes else 0, device=device)[None, None]
            own = torch.arange(self.longest, device=device)[None, None] + base
            at = (self.lengths[:, None] + torch.arange(self.width, device=device))[..., None]
            seen = torch.cat([(prefix < base).expand(-1, self.width, -1), own <= at], dim=-1)
            if window is not None:
                position = torch.cat([prefix.expand(len(base), -1, -1), own], dim=-1)
                seen = seen & (at - position < window)
            self.hidden[window] = ~seen[:, None, :, None]
        return self.hidden[window]


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
