"""Attention and draws of decode steps in C (`decode_kernels.c`).

T tokens of a step, n sequences of w each, H query heads, K key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import repeat

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from stretto.kernels.cpu.layer_kernels import LayerKernels, layer_kernels
from stretto.kernels.cpu.library import COUNT, POINTER, REAL, Kernel, confirmed, random

QUERIES = 1 << 14
"""Most numbers of the queries that look at one key head: they stand on a thread's stack."""

ARGUMENTS = {
    "attend": (*repeat(POINTER, 12), *repeat(COUNT, 10), *repeat(REAL, 2)),
    "weigh": (*repeat(POINTER, 3), *repeat(COUNT, 3)),
}
"""Of every kernel, as C has them."""


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """How the heads of queries and keys are turned, in one layer."""

    cosine: Tensor
    """(T, 1, D)."""
    sine: Tensor
    """(T, 1, D), the first half with its sign changed."""
    norms: tuple[Tensor, Tensor] | None = None
    """Weights of norms that come first, the queries' and the keys', in models that have them."""
    eps: float = 0.0
    """What norms add below the root."""

    @property
    def places(self) -> tuple[int | None, ...]:
        """Where in memory all of it is."""
        norms = (None, None) if self.norms is None else (self.norms[0].data_ptr(), self.norms[1].data_ptr())
        return self.cosine.data_ptr(), self.sine.data_ptr(), *norms


@dataclass(frozen=True, slots=True)
class DecodeKernels:
    """The kernels for states of one type; rows are contiguous unless said."""

    dtype: torch.dtype
    """The type."""
    of: Mapping[str, Kernel]
    """By their names in C."""
    layers: LayerKernels
    """Those that training has as well."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        keys: Tensor,
        values: Tensor,
        before: Tensor,
        scale: float,
        window: int | None,
        turn: HeadTurn | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(n*w, H, D) queries and (n*w, K, D) keys and values, rows of any stride -> (n*w, H, D), and (n*w, H), the log
        of what weights add up to.

        Queries and keys are turned in place, if that is asked. The new keys and values go into (S, K, L, D) `keys` and
        `values`, after the (n) tokens that each sequence has there `before`.
        """
        _, kv_heads, capacity, size = keys.shape
        tokens, query_heads, _ = query.shape
        out, totals = query.new_empty(tokens, query_heads, size), torch.empty(tokens, query_heads, dtype=torch.float32)
        self.of["attend"](
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            *((None, None, None, None) if turn is None else turn.places),
            keys.data_ptr(),
            values.data_ptr(),
            before.data_ptr(),
            out.data_ptr(),
            totals.data_ptr(),
            len(before),
            tokens // len(before),
            kv_heads,
            query_heads // kv_heads,
            size,
            capacity,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            window or 0,
            scale,
            0.0 if turn is None else turn.eps,
        )
        return out, totals

    def weigh(self, products: Tensor, temperatures: Tensor, block: int) -> Tensor:
        """(T, V) logits, before their (T, 1) temperatures in fp32 -> (T, M) log of summed exponentials of blocks."""
        assert products.dtype == self.dtype and products.is_contiguous()
        rows, vocabulary = products.shape
        out = torch.empty(rows, -(-vocabulary // block), dtype=torch.float32)
        self.of["weigh"](products.data_ptr(), temperatures.data_ptr(), out.data_ptr(), rows, vocabulary, block)
        return out

    def attends(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """True if (T, any, D) heads are of one size and of this type, and lie one after the other."""
        size = query.shape[2]
        return (
            key.shape[2] == value.shape[2] == size
            and query.dtype == key.dtype == value.dtype == self.dtype
            and all(each.shape[1] == 1 or each.stride(1) == size for each in (query, key, value))
            and query.stride(2) == key.stride(2) == value.stride(2) == 1
            and query.shape[1] // key.shape[1] * size <= QUERIES
        )


@cache
def decode_kernels(dtype: torch.dtype) -> DecodeKernels | None:
    """The kernels for states of this type; none if this machine cannot have them."""
    layers = layer_kernels(dtype)
    return confirmed(
        dtype, ARGUMENTS, lambda found: None if layers is None else DecodeKernels(dtype, found, layers), _tried
    )


@torch.no_grad()
def _tried(kernels: DecodeKernels) -> list[tuple[Tensor, Tensor]]:
    """What kernels and torch make of small numbers, with every size of heads that C knows by name."""
    logits = random(kernels.dtype, 3, 80)
    pairs = [(kernels.weigh(logits, torch.full((3, 1), 0.7, dtype=torch.float32), 32), _sums(logits.float() / 0.7, 32))]
    for size, window in ((24, None), (64, None), (64, 20), (128, None)):
        pairs += _attention(kernels, size, window)
    return pairs


def _sums(logits: Tensor, block: int) -> Tensor:
    """As `DecodeKernels.weigh`, of logits."""
    return torch.stack([part.logsumexp(-1) for part in logits.split(block, -1)], dim=1)


def _attention(kernels: DecodeKernels, size: int, window: int | None) -> list[tuple[Tensor, Tensor]]:
    """What kernels and torch make of two new tokens of three sequences: turned heads, what they see, and its sums."""
    query_heads, kv_heads, width, dtype = 4, 2, 2, kernels.dtype
    before = torch.tensor([0, 40, 68])
    tokens = width * len(before)
    rows = random(dtype, tokens, query_heads + 2 * kv_heads, size)
    norms, angles = random(dtype, 2, size), random(dtype, tokens, 1, size)
    cosine, sine, change = angles.cos(), angles.sin(), torch.tensor([-1, 1]).repeat_interleave(size // 2)
    asking, telling = rows[:, :query_heads], rows[:, query_heads:-kv_heads]
    normed = [rms_norm(part, (size,), norm, 1e-5) for part, norm in zip((asking, telling), norms, strict=True)]
    turned = torch.cat(normed, dim=1)
    turned = turned * cosine + turned.roll(size // 2, -1) * (sine * change)
    keys, values = (random(dtype, len(before), kv_heads, 70, size) for _ in range(2))
    heads, turn = rows.clone(), HeadTurn(cosine, sine * change, (norms[0], norms[1]), 1e-5)
    parts = heads.split((query_heads, kv_heads, kv_heads), dim=1)
    found, totals = kernels.attend(*parts, keys=keys, values=values, before=before, scale=0.1, window=window, turn=turn)
    scores = []
    sums = []
    for token in range(tokens):
        row, end = token // width, int(before[token // width]) + token % width + 1
        seen = slice(max(0, end - window) if window else 0, end)
        known, said = (each[row, :, seen].float().repeat_interleave(2, 0) for each in (keys, values))
        score = (known @ parts[0][token, :, :, None].float())[..., 0] * 0.1
        scores.append((score.softmax(-1)[:, None] @ said)[:, 0])
        sums.append(score.logsumexp(-1))
    return [(heads[:, :-kv_heads], turned), (found, torch.stack(scores)), (totals, torch.stack(sums))]
