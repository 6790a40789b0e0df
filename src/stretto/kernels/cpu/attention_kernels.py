"""Attention over a packed row in C (`attention_kernels.c`), forward and backward, without pads or masks.

T tokens of the row, H query heads, K key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from stretto.kernels.cpu.library import COUNT, POINTER, REAL, Kernel, confirmed, random, readable
from stretto.kernels.cpu.tiles import QueryBlock

TASKS = 2
"""Tasks of a backward for each thread, at least, so that none waits long for the last one. Each adds up in memory of
its own, as much as the keys and values of one head take in fp32."""

MOST_SHARES = 8
"""Shares of all stretches at most, however many threads there are."""

ARGUMENTS = {
    "attention": (*repeat(POINTER, 8), *repeat(COUNT, 11), REAL),
    "attention_backward": (*repeat(POINTER, 13), *repeat(COUNT, 14), REAL),
}
"""Of every kernel, as C has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """A row as stretches, each with all that it sees, as the kernels read them."""

    known: Tensor
    """Where the keys of every stretch stand in the row, stretch after stretch, its own tokens last."""
    starts: Tensor
    """Where in `known` each begins, and where the last one ends."""
    lengths: Tensor
    """Tokens of each."""
    work: NDArray[np.int64]
    """Pairs of tokens that there are to compute up to each of them, and with it."""

    @classmethod
    def of(cls, blocks: Sequence[QueryBlock]) -> Stretches:
        """Those of a row."""
        lengths = np.array([len(block.own) for block in blocks])
        keys = lengths + [len(block.before) for block in blocks]
        return cls(
            known=torch.from_numpy(np.concatenate([part for block in blocks for part in (block.before, block.own)])),
            starts=torch.from_numpy(np.append(0, np.cumsum(keys))),
            lengths=torch.from_numpy(lengths),
            work=np.cumsum(lengths * keys),
        )

    @property
    def places(self) -> tuple[int, int, int]:
        """Where in memory they are told."""
        return self.known.data_ptr(), self.starts.data_ptr(), self.lengths.data_ptr()

    def cuts(self, shares: int) -> Tensor:
        """Where to cut them into so many shares that take about as long."""
        inner = np.searchsorted(self.work, self.work[-1] * np.arange(1, shares) // shares, side="right")
        return torch.from_numpy(np.concatenate([[0], inner, [len(self.work)]]))


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """The kernels for states of one type."""

    dtype: torch.dtype
    """The type."""
    of: Mapping[str, Kernel]
    """By their names in C."""

    def serve(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """True if these are heads as the kernels read them: of one size and of this type."""
        return readable(self.dtype, query, key, value) and key.shape == value.shape

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, stretches: Stretches, *, scale: float, window: int | None
    ) -> Tensor:
        """(1, H, T, D), (1, K, T, D), (1, K, T, D) -> (1, H, T, D)."""
        result: Tensor = _StretchAttention.apply(query, key, value, stretches, scale, window or 0, self)
        return result


class _StretchAttention(torch.autograd.Function):
    """(1, H, T, D) queries, (1, K, T, D) keys and values -> (1, H, T, D).

    The backward computes the weights again, from what they add up to.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        stretches: Stretches,
        scale: float,
        window: int,
        kernels: AttentionKernels,
    ) -> Tensor:
        query, key, value = given = _rows(query, key, value)
        out, totals = query.new_empty(query.shape), torch.empty(query.shape[:2], dtype=torch.float32)
        failed = kernels.of["attention"](
            *(each.data_ptr() for each in (*given, out, totals)),
            *stretches.places,
            *_strides(*given),
            len(stretches.lengths),
            *_sizes(query, key),
            window,
            scale,
        )
        _check(failed)
        ctx.save_for_backward(*given, totals)
        ctx.how = stretches, scale, window, kernels
        return _heads(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, totals = ctx.saved_tensors
        given = (query, key, value, *_rows(gradients[0]))
        stretches, scale, window, kernels = ctx.how
        tokens, heads, size = key.shape
        shares = min(-(-TASKS * torch.get_num_threads() // heads), len(stretches.lengths), MOST_SHARES)
        cuts, sums = stretches.cuts(shares), torch.empty(shares, heads, 2, tokens, size, dtype=torch.float32)
        slopes = [torch.empty(each.shape, dtype=each.dtype) for each in (query, key, value)]
        failed = kernels.of["attention_backward"](
            *(each.data_ptr() for each in (*given, totals)),
            *stretches.places,
            *(each.data_ptr() for each in (cuts, sums, *slopes)),
            *_strides(*given),
            shares,
            tokens,
            *_sizes(query, key),
            window,
            scale,
        )
        _check(failed)
        return *map(_heads, slopes), None, None, None, None


def _rows(*states: Tensor) -> tuple[Tensor, ...]:
    """(1, any, T, D) -> (T, any, D), the numbers of a head side by side."""
    rows = (each[0].transpose(0, 1) for each in states)
    return tuple(each if each.stride(2) == 1 else each.contiguous() for each in rows)


def _heads(rows: Tensor) -> Tensor:
    """The other way."""
    return rows.transpose(0, 1)[None]


def _strides(*rows: Tensor) -> list[int]:
    """Numbers between tokens, and between heads, of each."""
    return [stride for each in rows for stride in each.stride()[:2]]


def _sizes(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    """Key heads, queries of each, and the numbers of a head."""
    heads, size = key.shape[1:]
    return heads, query.shape[1] // heads, size


def _check(failed: int | None) -> None:
    """As torch says it."""
    if failed:
        raise MemoryError("attention: not enough memory for a stretch of the row")


@cache
def attention_kernels(dtype: torch.dtype) -> AttentionKernels | None:
    """The kernels for states of this type; none if this machine cannot have them."""
    return confirmed(dtype, ARGUMENTS, lambda found: AttentionKernels(dtype, found), _tried)


def _tried(kernels: AttentionKernels) -> list[tuple[Tensor, Tensor]]:
    """What kernels and torch make of two stretches and of their slopes, at several sizes of heads."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for size, tokens, window in ((24, 21, None), (64, 40, None), (64, 40, 7), (128, 7, None)):
        place = np.arange(tokens)
        cut = [QueryBlock(before=place[:0], own=place[:5]), QueryBlock(before=place[:5], own=place[5:])]
        states = random(kernels.dtype, 12, tokens, size)[None].split((4, 2, 2, 4), dim=1)
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        seen = (distance >= 0) & (distance < (window or tokens))
        found = []
        for ours in (True, False):
            given = [each.to(dtype=None if ours else torch.float32).requires_grad_() for each in states]
            query, key, value, outgoing = given
            if ours:
                out = kernels.attend(query, key, value, Stretches.of(cut), scale=0.1, window=window)
            else:
                out = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.1, enable_gqa=True)
            found.append([out.detach(), *torch.autograd.grad(out, given[:3], outgoing.detach())])
        pairs += zip(*found, strict=True)
    return pairs
