"""Norms, gates and rotary positions of decoder layers in C (`layer_kernels.c`), forward and backward.

As torch computes them, each is a dozen operations over states that leave the processor's cache in between, and each
operation has all threads meet once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import repeat

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from stretto.kernels.cpu.library import COUNT, POINTER, REAL, Kernel, confirmed, random, readable

ROWS_OF_A_SUM = 64
"""Rows whose part of a norm weight's gradient one thread adds up: the same sums with any number of threads."""

ARGUMENTS = {
    "norm": (*repeat(POINTER, 3), *repeat(COUNT, 2), REAL),
    "norm_backward": (*repeat(POINTER, 5), *repeat(COUNT, 3), REAL),
    "gate": (*repeat(POINTER, 3), *repeat(COUNT, 3)),
    "gate_backward": (*repeat(POINTER, 5), COUNT),
    "rotate_heads": (*repeat(POINTER, 6), *repeat(COUNT, 7)),
}
"""Of every kernel, as C has them."""


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """The kernels for contiguous states of one type."""

    dtype: torch.dtype
    """The type."""
    of: Mapping[str, Kernel]
    """By their names in C."""

    def serve(self, *states: Tensor) -> bool:
        """True if all are what the kernels read."""
        return readable(self.dtype, *states) and all(each.is_contiguous() for each in states)

    def norm(self, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm of (..., W) states."""
        out = torch.empty_like(states)
        width = states.shape[-1]
        places = (each.data_ptr() for each in (states, weight, out))
        self.of["norm"](*places, states.numel() // width, width, eps)
        return out

    def norm_backward(
        self, states: Tensor, weight: Tensor, outgoing: Tensor, eps: float, *, trains: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of (..., W) states and, if it is trained, of the (W) weight."""
        width = states.shape[-1]
        rows = states.numel() // width
        slopes = torch.empty_like(states)
        sums = torch.empty(-(-rows // ROWS_OF_A_SUM), width, dtype=torch.float32) if trains else None
        places = (each.data_ptr() for each in (states, weight, outgoing, slopes))
        summed = None if sums is None else sums.data_ptr()
        self.of["norm_backward"](*places, summed, rows, width, ROWS_OF_A_SUM, eps)
        return slopes, None if sums is None else sums.sum(0).to(weight.dtype)

    def gate(self, gates: Tensor, ups: Tensor) -> Tensor:
        """(..., F) gates, and what passes through them; or (T, F) parts of longer rows, both of rows of one length."""
        out = torch.empty_like(gates, memory_format=torch.contiguous_format)
        rows, width = gates.numel() // gates.shape[-1], gates.shape[-1]
        stride = width if gates.is_contiguous() else gates.stride(0)
        self.of["gate"](gates.data_ptr(), ups.data_ptr(), out.data_ptr(), rows, width, stride)
        return out

    def gate_backward(self, gates: Tensor, ups: Tensor, outgoing: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of both."""
        slopes = torch.empty_like(gates), torch.empty_like(ups)
        places = (each.data_ptr() for each in (gates, ups, outgoing, *slopes))
        self.of["gate_backward"](*places, gates.numel())
        return slopes

    def reads_heads(self, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> bool:
        """True if these are heads and angles as the kernels read them."""
        size, tokens = query.shape[-1], len(query)
        alike = key.shape[-1] == size and len(key) == tokens and size % 2 == 0
        lie = all(each.shape[1] == 1 or each.stride(1) == size for each in (query, key))
        inner = query.stride(2) == key.stride(2) == 1
        angles = all(each.is_contiguous() and each.numel() == tokens * size for each in (cosine, sine))
        return alike and lie and inner and angles and readable(self.dtype, query, key, cosine, sine)

    def rotate(
        self, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, *, back: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(T, H, D) queries and (T, K, D) keys, rows of any stride, rotated by (T, D) angles; or slopes, `back`."""
        out = query.new_empty(query.shape), key.new_empty(key.shape)
        places = (each.data_ptr() for each in (query, key, cosine, sine, *out))
        strides = query.stride(0), key.stride(0)
        self.of["rotate_heads"](*places, len(query), query.shape[1], key.shape[1], query.shape[2], *strides, back)
        return out


@cache
def layer_kernels(dtype: torch.dtype) -> LayerKernels | None:
    """The kernels for states of this type; none if this machine cannot have them."""
    return confirmed(dtype, ARGUMENTS, lambda found: LayerKernels(dtype, found), _tried)


def _tried(kernels: LayerKernels) -> list[tuple[Tensor, Tensor]]:
    """What kernels and torch make of a few rows."""
    gates, ups, states, outgoing = random(kernels.dtype, 4, 3, 40)
    weight = random(kernels.dtype, 40)
    given = [each.detach().float().requires_grad_() for each in (gates, ups, states, weight)]
    gated, normed = silu(given[0]) * given[1], rms_norm(given[2], (40,), given[3], 1e-5)
    slopes = torch.autograd.grad([gated, normed], given, [outgoing.float(), outgoing.float()])
    of_states, of_weight = kernels.norm_backward(states, weight, outgoing, 1e-5, trains=True)
    assert of_weight is not None
    found = [*kernels.gate_backward(gates, ups, outgoing), of_states, of_weight]
    found += [kernels.gate(gates, ups), kernels.norm(states, weight, 1e-5)]
    return [*zip(found, [*slopes, gated.detach(), normed.detach()], strict=True), *_rotated(kernels)]


def _rotated(kernels: LayerKernels) -> list[tuple[Tensor, Tensor]]:
    """What kernels and torch make of heads of a few tokens, parts of longer rows, and of slopes."""
    rows = random(kernels.dtype, 3, 7, 40)
    query, key = rows[:, :4], rows[:, 4:6]
    cosine, sine = random(kernels.dtype, 2, 3, 40)
    heads = rows[:, :6].float().requires_grad_()
    first, second = heads.chunk(2, dim=-1)
    rotated = heads * cosine[:, None] + torch.cat([-second, first], dim=-1) * sine[:, None]
    slopes = torch.autograd.grad(rotated, heads, heads.detach())[0]
    found = (torch.cat(kernels.rotate(query, key, cosine, sine, back=back), dim=1) for back in (False, True))
    return list(zip(found, (rotated.detach(), slopes), strict=True))
