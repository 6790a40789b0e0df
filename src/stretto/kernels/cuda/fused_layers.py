"""RMS norms and gated feed-forward layers of a GPU, each as one kernel forward and one backward.

As they come, a norm is eight kernels and keeps its row in fp32 for the backward, and a gated layer keeps a factor that
is easily made again: together a third of what training keeps, and of a decode step most of the kernels, which take
longer to start than to compute. Numbers are those of the stock layers to rounding. Layers keep their class's name and
their weights; what the trial on this machine does not confirm stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.kernels.by_hand import by_hand, eps_of
from stretto.kernels.trials import largest_difference, works

ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Largest relative difference in the trial, by type."""

WIDEST = 1 << 14
"""Numbers of a row that a program holds."""

ELEMENTS = 1 << 10
"""Numbers of a program of the gated layer."""

PROGRAMS = 512
"""Most programs of a norm's backward; each adds up the weight's gradient of its rows."""


class _NormKernel(torch.autograd.Function):
    """(states (..., W), weight (W)) -> weight * states / rms(states)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        from stretto.kernels.cuda import triton_kernels as kernels

        states = states.contiguous()
        width = states.shape[-1]
        rows = states.numel() // width
        out, rates = torch.empty_like(states), torch.empty(rows, dtype=torch.float32, device=states.device)
        kernels.launch(kernels.norm_forward, (rows,), states, weight, out, rates, width, eps, BLOCK=_power(width))
        ctx.save_for_backward(states, weight, rates)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from stretto.kernels.cuda import triton_kernels as kernels

        states, weight, rates = ctx.saved_tensors
        outgoing, rows, width = gradients[0].contiguous(), len(rates), states.shape[-1]
        each = max(1, -(-rows // PROGRAMS))
        programs, trains = -(-rows // each), ctx.needs_input_grad[1]
        result = torch.empty_like(states)
        sums = torch.empty((programs if trains else 1, width), dtype=torch.float32, device=states.device)
        kernels.launch(
            kernels.norm_backward,
            (programs,),
            states,
            weight,
            rates,
            outgoing,
            result,
            sums,
            rows,
            width,
            each,
            BLOCK=_power(width),
            TRAINS=trains,
        )
        return result, sums.sum(0).to(weight.dtype) if trains else None, None


class _GatedKernel(torch.autograd.Function):
    """(gate (..., F), up (..., F)) -> silu(gate) * up, which keeps neither silu nor sigmoid for the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        from stretto.kernels.cuda import triton_kernels as kernels

        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        kernels.launch(
            kernels.gated_forward, (-(-gate.numel() // ELEMENTS),), gate, up, out, gate.numel(), BLOCK=ELEMENTS
        )
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        from stretto.kernels.cuda import triton_kernels as kernels

        gate, up = ctx.saved_tensors
        found = torch.empty_like(gate), torch.empty_like(up)
        programs = (-(-gate.numel() // ELEMENTS),)
        kernels.launch(
            kernels.gated_backward, programs, gate, up, gradients[0].contiguous(), *found, gate.numel(), BLOCK=ELEMENTS
        )
        return found


def _power(width: int) -> int:
    return 1 << (width - 1).bit_length()


class Fused(nn.Module):
    """A layer that was taken over."""


class _FusedNorm(Fused):
    """What a norm's class is given."""

    def forward(self, states: Tensor) -> Tensor:
        """As its class, in one kernel."""
        layer: Any = self
        # One that is cut over devices is no plain parameter, and not the kernel's to read.
        if states.dtype != layer.weight.dtype or not states.is_cuda or type(layer.weight) is not nn.Parameter:
            own: Tensor = super().forward(states)
            return own
        result: Tensor = _NormKernel.apply(states, layer.weight, eps_of(layer))
        return result


class _FusedGated(Fused):
    """What the class of a feed-forward layer is given."""

    def forward(self, states: Tensor) -> Tensor:
        """As its class, with one kernel between its products."""
        layer: Any = self
        if not states.is_cuda:  # it lies in host memory while others use the device
            own: Tensor = super().forward(states)
            return own
        result: Tensor = layer.down_proj(_GatedKernel.apply(layer.gate_proj(states), layer.up_proj(states)))
        return result


def fuse_layers(network: PreTrainedModel) -> None:
    """Gives RMS norms and gated layers of a GPU the kernels from here, if they are the plain kind, which is tried."""
    dtype = network.dtype
    if network.device.type != "cuda" or dtype not in ALLOWED:
        return
    for layer in network.modules():
        stock: Any = type(layer)
        if stock.__name__.endswith("RMSNorm") and _is_norm(layer, dtype) and _usable(layer, _trial_of_norm, dtype):
            layer.__class__ = by_hand(_FusedNorm, stock)
        elif stock.__name__.endswith("MLP") and _is_gated(layer) and _usable(layer, _trial_of_gated, dtype):
            layer.__class__ = by_hand(_FusedGated, stock)


def _is_norm(layer: Any, dtype: torch.dtype) -> bool:
    weight: Any = getattr(layer, "weight", None)
    plain = isinstance(weight, nn.Parameter) and weight.dim() == 1 and weight.dtype == dtype
    return plain and len(weight) <= WIDEST and eps_of(layer) is not None


def _is_gated(layer: Any) -> bool:
    """True too where its matrices are stored in few bits."""
    return all(isinstance(getattr(layer, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))


_tried: dict[tuple[Any, ...], bool] = {}
"""Layers that were tried, by class, sizes and settings -> whether they are taken over."""


def _usable(layer: Any, trial: Callable[[Any, torch.dtype], float], dtype: torch.dtype) -> bool:
    stock = type(layer)
    sizes = tuple((tuple(weight.shape), weight.dtype, weight.device) for weight in layer.parameters())
    key = (stock, dtype, *sizes, eps_of(layer), str(getattr(layer, "act_fn", "")))
    if key not in _tried:
        _tried[key] = works(stock.__name__, lambda: trial(layer, dtype), ALLOWED[dtype])
    return _tried[key]


def _trial_of_norm(layer: Any, dtype: torch.dtype) -> float:
    """The largest relative difference from the layer with other weights, in its output and both gradients."""
    copied, width, device = copy.deepcopy(layer), len(layer.weight), layer.weight.device
    copied.weight = nn.Parameter(torch.linspace(0.5, 1.5, width, device=device).to(dtype))

    def fused(rows: Tensor) -> Tensor:
        result: Tensor = _NormKernel.apply(rows, copied.weight, eps_of(layer))
        return result

    return _difference(copied, fused, _rows(width, dtype, device), copied.weight)


def _trial_of_gated(layer: Any, dtype: torch.dtype) -> float:
    """The largest relative difference in the output and in the gradient at the input."""

    def fused(rows: Tensor) -> Tensor:
        result: Tensor = layer.down_proj(_GatedKernel.apply(layer.gate_proj(rows), layer.up_proj(rows)))
        return result

    return _difference(layer, fused, _rows(layer.gate_proj.in_features, dtype, next(layer.parameters()).device))


def _rows(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.linspace(-2, 3, 3 * width, device=device).view(3, -1).to(dtype)


def _difference(
    plain: Callable[[Tensor], Tensor], fused: Callable[[Tensor], Tensor], states: Tensor, *weights: Tensor
) -> float:
    found = []
    for way in (plain, fused):
        rows = states.clone().requires_grad_()
        out = way(rows)
        outgoing = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
        found.append([out, *torch.autograd.grad(out, [rows, *weights], outgoing)])
    return largest_difference(zip(*found, strict=True))
