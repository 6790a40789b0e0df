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

ROWS = {"cpu": 32, "cuda": 1 << 14}
"""Rows that are read at once: on a CPU as many as its caches hold."""


def checksums(
    tensors: Iterable[tuple[str, Tensor]], rounded: Mapping[str, torch.dtype] | None = None
) -> dict[str, str]:
    """The checksum of each tensor, or of what it is when it is `rounded` to another type."""
    sums = {name: weighed(tensor, (rounded or {}).get(name, tensor.dtype)) for name, tensor in tensors}
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
    """The bytes of a flat tensor as words; the last is filled up with zeros."""
    raw = tensor.view(torch.uint8)
    if raw.numel() % WORD:
        raw = pad(raw, (0, -raw.numel() % WORD))
    elif raw.storage_offset() % WORD:
        raw = raw.clone()
    return raw.view(torch.int64)


def weighed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of words, each times the number of its column and the number of its row: two plain sums, no copy."""
    flat, device = tensor.detach().contiguous().reshape(-1), tensor.device
    count = flat.numel() * dtype.itemsize // WORD // ROW
    # Even, so that with that of the column it is odd.
    rows, columns = odd(ROW, count, device) - 1, odd(0, ROW, device)
    down, found, first = torch.zeros_like(columns), columns.new_tensor(flat.numel()), 0
    for part in flat.split(ROWS.get(device.type, 1) * ROW * WORD // dtype.itemsize):
        numbers = words(part.to(dtype))
        table = numbers[: numbers.numel() // ROW * ROW].view(-1, ROW)
        rest, last = numbers[table.numel() :], first + len(table)
        down += table.sum(0)
        found += (table.sum(1) * rows[first:last]).sum() + (rest * columns[: len(rest)]).sum()
        first = last
    return found + (down * columns).sum()


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
