"""What is compared when weights are proved: bits of tensors, never values within a tolerance.

Whoever holds the same version computed it alike or got it from one who did, so any difference is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> whole numbers of that size."""


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """CRC-32 of every tensor's bytes."""
    return {name: checksum(tensor) for name, tensor in tensors}


def checksum(tensor: Tensor) -> str:
    """CRC-32 of a tensor's bytes."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{zlib.crc32(raw.numpy().data):08x}"


def unlike(held: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are not their masters, rounded to what they compute in.

    On one device nothing is sent: an update rounds the optimizer's masters into the tensors that the engine reads, and
    this is what is left to go wrong. Where a tensor is its own master there is nothing to compare.
    """
    names = [name for name, tensor in held.items() if tensor is not masters[name]]
    if not names:
        return []
    differ = [_bits(held[name]).ne(_bits(masters[name].to(held[name].dtype))).any() for name in names]
    return [name for name, differs in zip(names, torch.stack(differ).tolist(), strict=True) if differs]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(BITS[tensor.element_size()])
