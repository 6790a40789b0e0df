"""What is compared when weights are proved: bits of tensors, never values within a tolerance.

Whoever holds the same version computed it alike or got it from one who did, so any difference is an error. Checksums
are computed where a tensor is, because it may be large and far from the host. They are sums of 64-bit words, each times
an odd number of its place, modulo 2^64: the same on every device in whatever order it adds, and any one word that
changes changes the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> whole numbers of that size."""

WORD = 8
"""Bytes of a word."""

ROW = 1 << 12
"""Words of a row."""


def checksums(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The checksum of each tensor."""
    sums = {name: weighed(words(tensor)) for name, tensor in tensors}
    places: dict[torch.device, list[str]] = {}
    for name, found in sums.items():
        places.setdefault(found.device, []).append(name)
    told: dict[str, str] = {}
    for names in places.values():  # what is on a device leaves it at once
        numbers = torch.stack([sums[name] for name in names]).tolist()
        told |= {name: f"{number % 2**64:016x}" for name, number in zip(names, numbers, strict=True)}
    return {name: told[name] for name in sums}


def checksum(tensor: Tensor) -> str:
    """The checksum of one tensor."""
    return checksums([("", tensor)])[""]


def words(tensor: Tensor) -> Tensor:
    """A tensor's bytes as words; the last is filled up with zeros."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.numel() % WORD:
        raw = pad(raw, (0, -raw.numel() % WORD))
    elif raw.storage_offset() % WORD:
        raw = raw.clone()
    return raw.view(torch.int64)


def weighed(numbers: Tensor) -> Tensor:
    """The sum of words, each times the number of its column and the number of its row: two plain sums, no copy."""
    full, device = numbers.numel() // ROW * ROW, numbers.device
    table, rest = numbers[:full].view(-1, ROW), numbers[full:]
    along = table.sum(1) * (odd(ROW, len(table), device) - 1)  # even, so that with that of the column it is odd
    return (
        (table.sum(0) * odd(0, ROW, device)).sum()
        + along.sum()
        + (rest * odd(1, len(rest), device)).sum()
        + numbers.numel()
    )


@lru_cache(maxsize=64)
def odd(first: int, count: int, device: torch.device) -> Tensor:
    """So many odd numbers, the same everywhere; those of rows are others than those of columns."""
    # 2^64 over the golden ratio, and then another mixer, so that neighbours have nothing in common.
    mixed = torch.arange(first + 1, first + count + 1, device=device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed | 1


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and type are equal to the bit."""
    return torch.equal(_bits(one), _bits(other))


def unlike(held: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that are not their masters, rounded to what they compute in.

    Where a tensor is its own master there is nothing to compare.
    """
    names = [name for name, tensor in held.items() if tensor is not masters[name]]
    if not names:
        return []
    differ = [_bits(held[name]).ne(_bits(masters[name].to(held[name].dtype))).any() for name in names]
    return [name for name, differs in zip(names, torch.stack(differ).tolist(), strict=True) if differs]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(BITS[tensor.element_size()])
