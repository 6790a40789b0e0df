"""Attention of a decode step: it writes the newest keys and values into the cache and looks at what is there.

n sequences of w tokens each, H query heads, K key and value heads, G = H / K, L tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.engines.native.cache import KeyValueCache, SharedPrefixes
from stretto.kernels.cpu.decode_kernels import DecodeKernels, HeadTurn
from stretto.models.logprob_head import accum_dtype

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Torch's kernel for CPUs, which also tells the logarithm of what the weights of each query add up to."""


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
    before: list[Tensor] = field(default_factory=list)
    """The (n) own tokens that each sequence has in the cache already, made once for all layers."""
    kernels: DecodeKernels | None = None
    """A CPU's, where it has them."""
    decodes: bool = True
    """Its queries look at what was kept before."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(1, H, n*w, D): the row holds the new tokens sequence after sequence."""
        rows = [each[0].transpose(0, 1) for each in (query, key, value)]
        if self.kernels is not None and self.kernels.attends(*rows):
            return self.attend_rows(layer, *rows, scale=scale, window=window).transpose(0, 1)[None]
        self.keep(layer, key, value)
        return self.look(layer, query, key, value, scale=scale, window=window)

    def attend_rows(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        turn: HeadTurn | None = None,
    ) -> Tensor:
        """(n*w, H, D) queries and (n*w, K, D) keys and values, which are to `turn` first -> (n*w, H, D), by a kernel
        over the sequences' own keys and one over their prefixes'."""
        assert self.kernels is not None
        keys, values = self.cache.at(layer, key.transpose(0, 1)[None], value.transpose(0, 1)[None])
        output, totals = self.kernels.attend(
            query,
            key,
            value,
            keys=keys,
            values=values,
            before=self._before(),
            scale=query.shape[2] ** -0.5 if scale is None else scale,
            window=window,
            turn=turn,
        )
        if self.prefixes is None:
            return output
        queries, own, sums = (self._apart(each, key.shape[1]) for each in (query, output, totals[..., None]))
        mixed = self._with_prefixes(layer, queries, own, sums, scale=scale, window=window)
        return self._together(mixed.to(value.dtype))

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
        size = query.shape[3]
        queries = self._apart(query[0].transpose(0, 1), key.shape[1])
        alike = values.shape[3] == size and query.dtype == keys.dtype == values.dtype
        if keys.device.type == "cpu" and alike:
            output = self._by_kernel(layer, queries, keys, values, scale=scale, window=window)
        else:
            scaled = queries.to(accum_dtype(query.dtype)) * (size**-0.5 if scale is None else scale)
            output = self._in_parts(layer, scaled, keys, values, window)
        return self._together(output.to(value.dtype)).transpose(0, 1)[None]

    def _apart(self, rows: Tensor, heads: int) -> Tensor:
        """(n*w, H, x) -> (n, K, w*G, x)."""
        n, size = len(self.lengths), rows.shape[2]
        return rows.reshape(n, self.width, heads, -1, size).transpose(1, 2).reshape(n, heads, -1, size)

    def _together(self, output: Tensor) -> Tensor:
        """(n, K, w*G, D) -> (n*w, H, D), in memory token after token, as the layer that follows reads it."""
        n, heads, _, size = output.shape
        return output.view(n, heads, self.width, -1, size).transpose(1, 2).reshape(n * self.width, -1, size)

    def _by_kernel(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(n, K, w*G, D) queries -> (n, K, w*G, D): torch's kernel over own keys, and over those of prefixes."""
        n, bias = len(queries), self._bias(window, queries)
        shared = bias.shape[-1] - self.longest
        keys, values = keys[:n, :, : self.longest], values[:n, :, : self.longest]
        output: Tensor
        output, total = FLASH(queries, keys, values, attn_mask=bias[..., shared:], scale=scale)
        if self.prefixes is None:
            return output
        return self._with_prefixes(layer, queries, output, total[..., None], scale=scale, window=window)

    def _with_prefixes(
        self, layer: int, queries: Tensor, own: Tensor, total: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """(n, K, w*G, D) queries -> (n, K, w*G, D): what was found among their `own` keys and in their prefixes.

        Kernels also tell the logarithm of what their weights add up to, by which the two are mixed.
        """
        prefixes = self.prefixes
        assert prefixes is not None
        tables, (bias, sees) = self._tables(prefixes, queries.shape[1]), self._prefix_bias(window, queries)
        found, beside = FLASH(prefixes.entered(queries, tables), *prefixes.at(layer), attn_mask=bias, scale=scale)
        found, beside = (prefixes.left(each, queries, tables) for each in (found, beside[..., None]))
        share = (beside - total).sigmoid_().masked_fill_(~sees, 0)
        return own.to(share.dtype).lerp_(found.to(share.dtype), share)

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

    def _before(self) -> Tensor:
        if not self.before:
            self.before.append(self.lengths - self.bases)
        return self.before[0]

    def _spots(self, heads: int, capacity: int) -> Tensor:
        """Token after token, the places of its heads."""
        if (heads, capacity) not in self.spots:
            device = self.lengths.device
            slots = torch.arange(len(self.lengths), device=device)[:, None, None] * heads
            places = self._before()[:, None] + torch.arange(self.width, device=device)
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
