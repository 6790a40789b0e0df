"""What plain operations and kernels compute to the same bit: masters in two halves, and the noise of rounding."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_FACTOR = -7046029254386353131
"""2^64 over the golden ratio, as a signed number."""

SECOND_FACTOR = -4658895280553007687
"""Another mixer's, so that noise of neighbors has nothing in common."""


def joined(weight: Tensor, rest: Tensor) -> Tensor:
    """bf16 weights and the rest of their masters -> fp32 masters."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + rest).view(torch.float32)


def parted(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 masters -> bf16 weights, rounded to the nearest, and the rest."""
    weight = master.to(torch.bfloat16)
    rest = master.view(torch.int32) - (weight.view(torch.int16).to(torch.int32) << 16)
    return weight, rest.clamp_(max=32767).to(torch.int16)  # 32768 lies between two weights, and would not be unique


def noise_of(places: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two numbers from 0 to 1 for each place in a parameter; the same on every device."""
    mixed = (places * FIRST_FACTOR) ^ seed
    mixed = (mixed ^ (mixed >> 29)) * SECOND_FACTOR
    mixed ^= mixed >> 32
    return ((mixed & 0xFFFFFF).float() / 2**24), (((mixed >> 24) & 0xFFFFFF).float() / 2**24)
