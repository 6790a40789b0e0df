"""An update by AdamW with moments of 16 or 8 bits, each parameter in one kernel on a GPU.

As it comes it is some sixty passes over pieces in fp32 and in 64 bits, half a second for 3B parameters; here weights,
masters' halves, moments and gradients are read once and written once. Rounding draws the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from stretto.kernels.bits import joined
from stretto.kernels.trials import largest_difference, works

NUMBERS = 1 << 11
"""Numbers of a program."""

HALF_BLOCK = 256
"""Of moments in 16 bits, which have no scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """An update's numbers."""

    rate: float
    """Learning rate."""
    update: int
    """How many there were before."""
    betas: tuple[float, float]
    """How slow the averages are."""
    decay: float
    """Weight decay."""
    eps: float
    """What is added below."""


def update(
    weight: Tensor,
    rest: Tensor | None,
    gradient: Tensor,
    moments: Mapping[str, Tensor],
    *,
    block: int | None,
    first: int,
    seed: int,
    step: AdamStep,
) -> None:
    """Moves a parameter, or a slice of its rows that begins at number `first` of it. `block` is how many numbers of a
    row share a scale, none where moments have 16 bits."""
    from stretto.kernels.cuda import triton_kernels as kernels

    size = block or HALF_BLOCK
    wide = 1 << (size - 1).bit_length()
    blocks, rows = -(-weight.numel() // size), max(1, NUMBERS // wide)
    one, other = (moments[name] for name in ("exp_avg", "exp_avg_sq"))
    count, (beta1, beta2) = step.update + 1, step.betas
    kernels.launch(kernels.narrow_update, (-(-blocks // rows),),
        weight, weight if rest is None else rest, gradient,
        one, moments.get("exp_avg_scale", one), other, moments.get("exp_avg_sq_scale", other),
        blocks, size, weight.numel(), first, seed,
        1 - step.rate * step.decay, 1 - beta1, beta2, 1 - beta2, step.rate / (1 - beta1**count),
        math.sqrt(1 - beta2**count), step.eps,
        ROWS=rows, BLOCK=wide, NARROW=rest is not None, QUARTER=block is not None,
    )  # fmt: skip


@lru_cache(maxsize=8)
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel works on parameters of this type here: tried once, and said if not."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float32):
        return False
    return works("the optimizer's update", lambda: _trial(device, dtype), 1e-3)


def _trial(device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative difference of a first update from what the formula gives, in masters and averages."""
    places = torch.arange(4 * 200, device=device).view(4, -1)
    begun, slopes = (places * 0.7).sin().to(dtype), (places * 0.3).cos() * (1 + places % 7)
    step = AdamStep(rate=0.01, update=0, betas=(0.9, 0.99), decay=0.1, eps=1e-8)
    expected, difference = begun.double() * (1 - 0.01 * 0.1) - 0.01 * slopes.double().sign(), 0.0
    for block in (None, 200):
        weight, mean = begun.clone(), torch.zeros_like(begun, dtype=torch.bfloat16 if block is None else torch.int8)
        rest = torch.zeros_like(begun, dtype=torch.int16) if dtype == torch.bfloat16 else None
        square = torch.zeros_like(begun, dtype=torch.bfloat16 if block is None else torch.uint8)
        scales = {name: torch.ones(4, 1, device=device) for name in ("exp_avg_scale", "exp_avg_sq_scale")}
        moments = {"exp_avg": mean, "exp_avg_sq": square, **(scales if block else {})}
        update(weight, rest, slopes, moments, block=block, first=0, seed=7, step=step)
        master = weight.double() if rest is None else joined(weight, rest).double()
        share = mean.double() / 127
        found = mean.double() if block is None else share * share.abs() * scales["exp_avg_scale"]
        # Averages are rounded at random, 8 bits coarsely.
        averages = largest_difference([(0.1 * slopes, found)])
        difference = max(difference, largest_difference([(expected, master)]), 1e-2 * averages)
    return difference
