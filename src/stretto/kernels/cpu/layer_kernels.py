"""Norms and gates of decoder layers in C (`layer_kernels.c`), forward and backward.

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
    return list(zip(found, [*slopes, gated.detach(), normed.detach()], strict=True))
