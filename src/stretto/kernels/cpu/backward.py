"""Backward passes written by hand, for three kinds of layers whose automatic one moves far more bytes than it must.

An RMS norm is differentiated by torch as a dozen passes over the whole row in fp32, and so is the product in a gated
feed-forward layer, of which torch also keeps a factor that is easily made again. Here each is one kernel in C, or, on a
machine without, a few passes over pieces that stay in the processor's cache. A layer with LoRA is a dozen operations,
each over its whole output; here the adapter's product is added inside the matrix product. Numbers are those of the
stock layers to rounding. Layers keep their class's name and their weights, and copies of them are complete.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.lora import Linear as Adapted
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.kernels.by_hand import by_hand, eps_of
from stretto.kernels.cpu.layer_kernels import LayerKernels, layer_kernels
from stretto.kernels.cpu.rotation import has_plain_rotary, with_rotary_kernel
from stretto.models.logprob_head import accum_dtype, chunks
from stretto.models.quantised import QuantisedLinear, product, product_backward

CACHED_NUMBERS = 1 << 18
"""Numbers of a row at once: 1 MiB in fp32."""


class _Norm(torch.autograd.Function):
    """(states (..., W), weight (W)) -> weight * states / rms(states)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, eps: float, own: Any) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.eps = eps
        return _normed(states, weight, eps, own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        if (kernels := _kernels(states, weight, outgoing := gradients[0].contiguous())) is not None:
            trains = ctx.needs_input_grad[1]
            return *kernels.norm_backward(states, weight, outgoing, ctx.eps, trains=trains), None, None
        width, kind = states.shape[-1], accum_dtype(states.dtype)
        rows, outgoing = states.reshape(-1, width), gradients[0].reshape(-1, width)
        result, factor = torch.empty_like(rows), weight.to(kind)
        weight_gradient = factor.new_zeros(width) if ctx.needs_input_grad[1] else None
        for part in chunks(len(rows), width, CACHED_NUMBERS):
            inner = rows[part].to(kind, copy=True)
            scale = inner.square().mean(-1, keepdim=True).add_(ctx.eps).rsqrt_()
            inner.mul_(scale)
            slope = outgoing[part].to(kind, copy=True)
            if weight_gradient is not None:
                weight_gradient += (slope * inner).sum(0)
            slope.mul_(factor)
            along = (slope * inner).mean(-1, keepdim=True)
            result[part] = slope.addcmul_(inner, along, value=-1).mul_(scale)
        return (
            result.view(states.shape) if ctx.needs_input_grad[0] else None,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None,
            None,
        )


class _Gated(torch.autograd.Function):
    """(gate (..., F), up (..., F)) -> silu(gate) * up, which keeps neither silu nor sigmoid for the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if (kernels := _kernels(gate, up, slopes := gradients[0].contiguous())) is not None:
            return kernels.gate_backward(gate, up, slopes)
        width, kind = gate.shape[-1], accum_dtype(gate.dtype)
        gates, ups, outgoing = (states.reshape(-1, width) for states in (gate, up, gradients[0]))
        gate_gradient, up_gradient = torch.empty_like(gates), torch.empty_like(ups)
        for part in chunks(len(gates), width, CACHED_NUMBERS):
            inner, slope = gates[part].to(kind, copy=True), outgoing[part].to(kind, copy=True)
            share = inner.sigmoid()
            silu = inner.mul_(share)
            up_gradient[part] = slope * silu
            # The slope of silu is sigmoid + silu * (1 - sigmoid).
            gate_gradient[part] = slope.mul_(ups[part]).mul_(share.addcmul_(silu, 1 - share))
        return gate_gradient.view_as(gate), up_gradient.view_as(up)


def _kernels(*states: Tensor) -> LayerKernels | None:
    """The kernels in C, if they read all of these."""
    kernels = layer_kernels(states[0].dtype)
    return kernels if kernels is not None and kernels.serve(*states) else None


def _normed(states: Tensor, weight: Tensor, eps: float, own: Any) -> Tensor:
    """What a norm gives."""
    kernels = _kernels(states, weight)
    result: Tensor = own(states) if kernels is None else kernels.norm(states, weight, eps)
    return result


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    kernels = _kernels(gate, up)
    return nn.functional.silu(gate).mul_(up) if kernels is None else kernels.gate(gate, up)


class _LowRank(torch.autograd.Function):
    """(states (..., I), fixed weight (O, I) or none of a base in few bits, that, down (r, I), up (O, r)) -> the layer
    with its adapter."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor | None, base: Any, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        rows = states.reshape(-1, states.shape[-1])
        low = rows @ down.t()
        out = product(base, rows) if weight is None else nn.functional.linear(rows, weight, base.bias)
        torch.addmm(out, low, up.t(), alpha=scale, out=out)
        ctx.save_for_backward(states, weight, down, up, low)
        ctx.base, ctx.scale = base, scale
        return out.view(*states.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, down, up, low = ctx.saved_tensors
        rows, outgoing = states.reshape(-1, states.shape[-1]), gradients[0].reshape(-1, len(up))
        middle = (outgoing @ up).mul_(ctx.scale)
        back = None
        if ctx.needs_input_grad[0]:
            back = product_backward(ctx.base, outgoing) if weight is None else outgoing @ weight
            back = torch.addmm(back, middle, down, out=back).view(states.shape)
        return back, None, None, middle.t() @ rows, (outgoing.t() @ low).mul_(ctx.scale), None


class _HandNorm(nn.Module):
    """What a norm's class is given."""

    def forward(self, states: Tensor) -> Tensor:
        """As its class, to rounding."""
        layer: Any = self
        given: Any = (states, layer.weight, eps_of(layer), super().forward)
        differentiated = torch.is_grad_enabled() and (states.requires_grad or layer.weight.requires_grad)
        result: Tensor = _Norm.apply(*given) if differentiated else _normed(*given)
        return result


class _HandGated(nn.Module):
    """What the class of a feed-forward layer is given."""

    def forward(self, states: Tensor) -> Tensor:
        """As its class, to rounding."""
        layer: Any = self
        gate, up = layer.gate_proj(states), layer.up_proj(states)
        differentiated = torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad)
        result: Tensor = layer.down_proj(_Gated.apply(gate, up) if differentiated else _gated(gate, up))
        return result


class _HandAdapter(Adapted):
    """A linear layer with adapters."""

    def forward(self, states: Tensor, *rest: Any, **more: Any) -> Tensor:
        """As PEFT's, unless one adapter just adds its product."""
        layer: Any = self
        if rest or more or layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
            return super().forward(states, *rest, **more)
        base, (name,) = layer.base_layer, layer.active_adapters
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        weight = None if isinstance(base, QuantisedLinear) else base.weight
        result: Tensor = _LowRank.apply(states, weight, base, down, up, layer.scaling[name])
        return result


def take_over(network: nn.Module) -> None:
    """Gives RMS norms, gated layers and the rotary positions of attention the passes from here on a CPU, if they are
    the plain kind, which is tried."""
    for layer in network.modules():
        stock: Any = type(layer)
        if stock.__name__.endswith("RMSNorm") and is_plain(layer):
            layer.__class__ = by_hand(_HandNorm, stock)
        elif stock.__name__.endswith("MLP") and is_gated(layer):
            layer.__class__ = by_hand(_HandGated, stock)
        elif stock.__name__.endswith("Attention") and has_plain_rotary(layer):
            layer.__class__ = with_rotary_kernel(stock)


def take_over_adapters(network: nn.Module) -> None:
    """Gives every layer with LoRA the passes from here."""
    for layer in network.modules():
        if type(layer) is Adapted and (simple(layer) or simple_in_few_bits(layer)):
            layer.__class__ = _HandAdapter


@torch.no_grad()
def is_plain(layer: Any) -> bool:
    """True if a norm on a CPU gives its weight times the states over their root mean square, in fp32 or shorter."""
    weight = getattr(layer, "weight", None)
    eps = eps_of(layer)
    if not isinstance(weight, nn.Parameter) or weight.device.type != "cpu" or weight.dim() != 1 or eps is None:
        return False
    if weight.dtype == torch.float64:  # the stock ones round to fp32 on the way
        return False
    states = torch.linspace(-2, 3, 2 * len(weight)).view(2, -1).to(weight.dtype)
    exact = states.double()
    expected = weight.double() * exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt()
    close = torch.finfo(weight.dtype).eps * 4
    return torch.allclose(layer(states).double(), expected, rtol=close, atol=close)


@torch.no_grad()
def is_gated(layer: Any) -> bool:
    """True if a feed-forward layer on a CPU gives down(silu(gate) * up)."""
    parts = [getattr(layer, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is nn.Linear and part.weight.device.type == "cpu" for part in parts):
        return False
    gate, up, down = cast(list[nn.Linear], parts)
    states = torch.linspace(-2, 3, 2 * gate.in_features, dtype=gate.weight.dtype).view(2, -1)
    return torch.equal(layer(states), down(nn.functional.silu(gate(states)) * up(states)))


def simple(module: Any) -> bool:
    """True for a linear layer with adapters that do nothing but add their products."""
    return isinstance(module, Adapted) and type(module.base_layer) is nn.Linear and _just_add(module)


def simple_in_few_bits(module: Any) -> bool:
    """The same of a base in few bits on a CPU."""
    base = module.base_layer if isinstance(module, Adapted) else None
    return isinstance(base, QuantisedLinear) and base.weight.device.type == "cpu" and _just_add(module)


def _just_add(module: Any) -> bool:
    plain = all(type(dropout) is nn.Identity for dropout in module.lora_dropout.values())
    dtypes = {weight.dtype for weight in module.parameters() if weight.is_floating_point()}
    fixed = not any(weight.requires_grad for weight in module.base_layer.parameters())
    return plain and fixed and len(dtypes) == 1 and not module.merged and not module.lora_variant
