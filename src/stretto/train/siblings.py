"""Attention of siblings side by side: segments with the same ancestors and about the same length, as a small batch.

In one attention over a row nearly every pair of tokens of two siblings would be masked. Side by side they only see
their ancestors and themselves, and the batch is small enough for plain matrix products in the processor's cache, which
are several times faster there than torch's kernel. Used on CPUs, where `batches_of` finds that it pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.train.head import wide
from stretto.train.segments import Cut, Segment, reach_of, spans_of

PER_CALL = 4_000
"""What a piece of its own costs beside its arithmetic, in pairs of tokens."""

MOST_PAIRS = 32_000
"""Pairs of tokens in a batch of siblings: beyond, their scores leave the processor's cache, and nothing is saved."""


class _Rearranged(torch.autograd.Function):
    """Rows taken from other places, of which each is used once at most; so the gradient is taken back the same way."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, there: Tensor, back: Tensor, used: Tensor | None) -> Tensor:
        ctx.save_for_backward(there, back, used)
        return states.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, back, used = ctx.saved_tensors
        gradient = gradients[0].index_select(0, back)
        return gradient if used is None else gradient * used[:, None], None, None, None


class _Attention(torch.autograd.Function):
    """Attention of a small batch as plain matrix products, several times faster there than torch's kernel for CPUs.

    (n, H, L, D) queries, (n, K, S, D) keys and values, (L, S) True where nobody looks. The backward computes the
    weights again rather than keep them.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
        output = torch.matmul(_weights(query, key, hidden, scale).to(value.dtype), value)
        output = output.view(*query.shape[:3], value.shape[3])
        ctx.save_for_backward(query, key, value, hidden, output)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, hidden, output = ctx.saved_tensors
        heads = (*key.shape[:2], -1)
        asked = query.reshape(*heads, key.shape[3])
        outgoing, said = (states.reshape(*heads, value.shape[3]) for states in (gradients[0], output))
        weights = _weights(query, key, hidden, ctx.scale)
        mean = (outgoing.to(weights.dtype) * said.to(weights.dtype)).sum(-1, keepdim=True)
        slopes = torch.matmul(outgoing, value.transpose(2, 3)).to(weights.dtype).sub_(mean).mul_(weights)
        slopes = slopes.mul_(ctx.scale).to(query.dtype)
        value_gradient = torch.matmul(weights.to(query.dtype).transpose(2, 3), outgoing)
        query_gradient = torch.matmul(slopes, key).view(query.shape)
        return query_gradient, torch.matmul(slopes.transpose(2, 3), asked), value_gradient, None, None


def _weights(query: Tensor, key: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """(n, K, H/K * L, S) attention weights in the wide type."""
    n, heads = key.shape[:2]
    scores = torch.matmul(query.reshape(n, heads, -1, query.shape[3]), key.transpose(2, 3)).to(wide(query.dtype))
    scores.mul_(scale).view(n, heads, -1, *hidden.shape).masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """Segments with the same ancestors and about the same length, side by side: nobody looks past another's shoulder.

    In one attention over all of them nearly every pair of tokens would be masked. Here each is a row of a batch, padded
    to the longest; keys of the ancestors stand before the own ones.
    """

    queries: slice
    """Where the segments stand in the row, one after the other."""
    before: tuple[slice, ...]
    """Where the keys of ancestors stand."""
    there: Tensor
    """(n * longest) for each place of the batch a token of the segments, counted from the first; pads repeat one."""
    back: Tensor
    """(tokens) where each token stands in the batch."""
    used: Tensor
    """(n * longest) 0 for pads, else 1."""
    count: int
    """n."""
    visible: Tensor
    """(longest, ancestors + longest) True where a query may look, the same for all; pads come last and see no harm."""
    distance: Tensor
    """(longest, ancestors + longest) how far back a key stands, for sliding windows."""

    def attend(self, query: Cut, key: Cut, value: Cut, *, scale: float | None, window: int | None) -> Tensor:
        """(1, H, queries, D)."""
        queries, keys, values = self._spread(query), self._reach(key), self._reach(value)
        mask = self.visible if window is None else self.visible & (self.distance < window)
        output: Tensor = _Attention.apply(queries, keys, values, ~mask, scale or queries.shape[3] ** -0.5)
        flat = output.transpose(1, 2).flatten(0, 1).flatten(1)  # (n * longest, H * D)
        kept = _Rearranged.apply(flat, self.back, self.there, self.used.to(flat.dtype))
        return kept.view(1, -1, *output.shape[1::2]).transpose(1, 2)

    def _spread(self, states: Cut) -> Tensor:
        """(n, H, longest, D) of the segments."""
        own = states[self.queries].squeeze(0).transpose(0, 1)
        heads, size = own.shape[1:]
        spread: Tensor = _Rearranged.apply(own.flatten(1), self.there, self.back, None)
        return spread.view(self.count, -1, heads, size).transpose(1, 2)

    def _reach(self, states: Cut) -> Tensor:
        own = self._spread(states)
        shared = [states[place].expand(self.count, -1, -1, -1) for place in self.before]
        return torch.cat([*shared, own], dim=2)


def batches_of(run: Sequence[Segment], *, ancestors: int, block: int) -> list[slice]:
    """How to cut siblings into batches of about equal lengths; nothing if attention in blocks of tokens costs less.

    Costs are pairs of tokens that are computed, and `PER_CALL` for a piece of its own.
    """
    if len(run) < 2:
        return []
    lengths = [segment.length for segment in run]
    total = sum(lengths)
    batches = [slice(0, 0)]
    cost = 0
    for index, length in enumerate(lengths):
        first = batches[-1].start
        longest = max(lengths[first : index + 1])
        together = (index + 1 - first) * longest * (ancestors + longest)
        alone = length * (ancestors + length)
        if alone > MOST_PAIRS:
            return []
        if index > first and (together > cost + alone + PER_CALL or together > MOST_PAIRS):
            batches.append(slice(index, index + 1))
            cost = alone
        else:
            batches[-1], cost = slice(first, index + 1), together
    padded = [(part.stop - part.start, max(lengths[part])) for part in batches]
    apart = sum(count * longest * (ancestors + longest) + PER_CALL for count, longest in padded)
    return batches if apart < total * (ancestors + min(total, block)) else []


def make_siblings(segments: Sequence[Segment], members: Sequence[int], device: torch.device) -> Siblings:
    """One batch of consecutive siblings."""
    first, lengths = segments[members[0]], np.array([segments[index].length for index in members])
    longest, starts = int(lengths.max()), np.cumsum(lengths) - lengths
    inside = np.arange(longest)[None] < lengths[:, None]
    there = np.where(inside, starts[:, None] + np.arange(longest), 0)
    ancestors = reach_of(segments, members[0])
    position = np.arange(ancestors + longest)
    distance = position[ancestors:, None] - position[None, :]
    return Siblings(
        queries=slice(first.start, first.start + int(lengths.sum())),
        before=spans_of(segments, first.ancestors),
        there=torch.as_tensor(there.ravel(), device=device),
        back=torch.as_tensor(np.flatnonzero(inside), device=device),
        used=torch.as_tensor(inside.ravel(), device=device),
        count=len(members),
        visible=torch.as_tensor(distance >= 0, device=device),
        distance=torch.as_tensor(distance, device=device),
    )
