"""Rotary positions of attention layers: queries and keys rotated by one kernel, where torch takes a dozen operations.

A layer rotates its heads by calling a function of its module, `apply_rotary_pos_emb`. Its class is given a forward of
the same code that calls the one here; nothing of transformers is changed for anybody else. What is changed in such a
module later, these layers do not see. Numbers are the function's own to rounding, which in bfloat16 is where it rounds;
slopes are rounded once instead of at each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.kernels.cpu.layer_kernels import LayerKernels, layer_kernels
from stretto.kernels.cpu.library import random

NAME = "apply_rotary_pos_emb"
"""What such a function is called in every module of transformers that has one."""

Rotate = Callable[..., tuple[Tensor, Tensor]]
"""(1, H, T, D) queries, (1, K, T, D) keys, (1, T, D) cosines, sines -> the heads, rotated."""


class _Rotary(torch.autograd.Function):
    """Queries and keys, rotated; heads lie within tokens, as they do in memory. Angles are not learned."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, kernels: LayerKernels
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        ctx.kernels = kernels
        return kernels.rotate(query, key, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key = (each.contiguous() for each in gradients)
        return *ctx.kernels.rotate(query, key, *ctx.saved_tensors, back=True), None, None, None


def rotated(stock: Rotate, *given: Any, **more: Any) -> Any:
    """Rotated heads, by a kernel where it reads them, and as `stock` does it elsewhere."""
    if more or len(given) != 4 or given[0].dim() != 4 or len(given[0]) != 1:
        return stock(*given, **more)
    (query, key), (cosine, sine) = (each[0].transpose(0, 1) for each in given[:2]), given[2:]
    kernels = None if cosine.requires_grad or sine.requires_grad else layer_kernels(query.dtype)
    if kernels is None or not kernels.reads_heads(query, key, cosine, sine):
        return stock(*given)
    query, key = _Rotary.apply(query, key, cosine, sine, kernels)
    return query.transpose(0, 1)[None], key.transpose(0, 1)[None]


@cache
def with_rotary_kernel(stock: Any) -> Any:
    """An attention layer's class whose heads are rotated here, under its own name."""
    forward = _calling_the_kernel(stock.forward)
    return type(stock.__name__, (stock,), {"__module__": stock.__module__, "forward": forward})


def _calling_the_kernel(forward: FunctionType) -> FunctionType:
    """A forward of the same code with another function of that name, inside the decorators that it has."""
    known, cells, told = forward.__globals__, forward.__closure__, dict(forward.__dict__)
    if (inner := told.get("__wrapped__")) is None:
        known = {**known, NAME: partial(rotated, known[NAME])}
    else:
        told["__wrapped__"] = ours = _calling_the_kernel(inner)
        cells = tuple(CellType(ours) if _holds(cell, inner) else cell for cell in cells or ())
    made = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, cells)
    made.__kwdefaults__ = forward.__kwdefaults__
    made.__dict__.update(told)
    return made


def _innermost(forward: object) -> FunctionType | None:
    """The function inside the decorators of a forward, if all of them are functions."""
    while isinstance(forward, FunctionType) and "__wrapped__" in forward.__dict__:
        forward = forward.__dict__["__wrapped__"]
    return forward if isinstance(forward, FunctionType) else None


def _holds(cell: CellType, function: FunctionType) -> bool:
    """Whether it is the function that a closure's cell holds, which may be empty."""
    try:
        return cell.cell_contents is function
    except ValueError:
        return False


@torch.no_grad()
def has_plain_rotary(layer: nn.Module) -> bool:
    """True if an attention layer on a CPU rotates the halves of its heads against each other, and rounds like Llama's,
    which is tried. False of one that is rotated here already."""
    own, size = _innermost(getattr(type(layer), "forward", None)), getattr(layer, "head_dim", None)
    if own is None or NAME not in own.__code__.co_names or not isinstance(size, int) or size % 2:
        return False
    rotate, weight = own.__globals__.get(NAME), next(layer.parameters(), None)
    if weight is None or weight.device.type != "cpu" or not isinstance(rotate, FunctionType):
        return False
    return all(_is_plain(rotate, size, dtype) for dtype in {torch.float32, weight.dtype} if dtype.is_floating_point)


def _is_plain(rotate: Rotate, size: int, dtype: torch.dtype) -> bool:
    """Whether it gives what the formula does, to the bit."""
    query, key, cosine, sine = (random(dtype, 1, heads, 3, size) for heads in (2, 3, 4, 5))
    cosine, sine = cosine[:, 0], sine[:, 0]
    try:
        found = rotate(query, key, cosine, sine)
    except Exception:  # it is asked otherwise
        return False
    expected = [each * cosine[:, None] + _against(each) * sine[:, None] for each in (query, key)]
    return len(found) == 2 and all(map(torch.equal, found, expected))


def _against(heads: Tensor) -> Tensor:
    """Halves in each other's place, the first with its sign changed."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
