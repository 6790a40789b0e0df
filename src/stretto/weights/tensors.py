"""What is compared when weights are proved: bits of tensors, never values within a tolerance.

Whoever holds the same version computed it alike or got it from one who did, so any difference is an error. Checksums
are computed where a tensor is, because it may be large and far from the host. They are sums of 64-bit words, each times
an odd number of its row and one of its column, modulo 2^64: the same on every device in whatever order it adds, and any
one word that changes changes the sum. Memory that only this process looks at is sealed instead (`seal`), which is as
fast as memory is read, but says nothing that another kind of device could say too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch
import xxhash
from torch import Tensor
from torch.nn.functional import pad

One = TypeVar("One")
Other = TypeVar("Other")

Kind = tuple[torch.device, torch.dtype, torch.dtype, int]
"""Where tensors are, their type, the one they are rounded to, how many numbers they have."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> whole numbers of that size."""

WORD = 8
"""Bytes of a word."""

ROW = 512
"""Words of a row."""

ROWS = {"cpu": 1 << 12, "cuda": 1 << 16}
"""Rows that are read at once: little beside the weights, and on a CPU little enough for its caches."""

SMALL = 1 << 7
"""Rows that are not worth a second thread."""

FEW = 1 << 22
"""Bytes of a tensor that a GPU reads beside others of its size: a kernel takes longer to start than to read it."""


def checksums(
    tensors: Iterable[tuple[str, Tensor]], rounded: Mapping[str, torch.dtype] | None = None
) -> dict[str, str]:
    """The checksum of each tensor, or of what it is when it is `rounded` to another type."""
    sums, sizes, alike = dict[str, Tensor](), dict[str, int](), defaultdict[Kind, dict[str, Tensor]](dict)
    for name, tensor in tensors:
        dtype, sizes[name] = (rounded or {}).get(name, tensor.dtype), tensor.numel()
        if tensor.device.type != "cpu" and tensor.nbytes <= FEW:
            alike[tensor.device, tensor.dtype, dtype, tensor.numel()][name] = tensor
        else:
            sums[name] = weighed(tensor, dtype)
    for (_, _, dtype, _), many in alike.items():
        table = torch.stack([tensor.detach().reshape(-1) for tensor in many.values()]).to(dtype)
        sums |= zip(many, weighed_rows(table).unbind(), strict=True)
    places: dict[torch.device, list[str]] = {}
    for name, found in sums.items():
        places.setdefault(found.device, []).append(name)
    told: dict[str, str] = {}
    for names in places.values():  # what is on a device leaves it at once
        numbers = torch.stack([sums[name] for name in names]).tolist()
        told |= {name: f"{(number + sizes[name]) % 2**64:016x}" for name, number in zip(names, numbers, strict=True)}
    return {name: told[name] for name in sizes}


def checksum(tensor: Tensor) -> str:
    """The checksum of one tensor."""
    return checksums([("", tensor)])[""]


def seal(memory: object) -> int:
    """A hash of some bytes of this process, for whoever has them to see later that they are the same."""
    return xxhash.xxh3_128_intdigest(memory)  # type: ignore[arg-type]  # anything that has a buffer


def weighed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a tensor's words, each times the numbers of its row and its column."""
    flat, device = tensor.detach().contiguous().reshape(-1), tensor.device
    numbers = ROW * WORD // dtype.itemsize
    rows = odd(ROW, -(-flat.numel() // numbers), device)
    found, first = torch.zeros((), dtype=torch.int64, device=device), 0
    for part in flat.split(ROWS.get(device.type, 1) * numbers):
        sums = row_sums(words(part.to(dtype)))
        found += (sums * rows[first : first + len(sums)]).sum()
        first += len(sums)
    return found


def weighed_rows(table: Tensor) -> Tensor:
    """(n, numbers) tensors of one size -> (n) the same sum of each."""
    raw = table.view(torch.uint8)
    words = pad(raw, (0, -raw.shape[1] % (ROW * WORD))).view(torch.int64).view(len(table), -1, ROW)
    sums = (words * odd(0, ROW, table.device)).sum(2)
    return (sums * odd(ROW, words.shape[1], table.device)).sum(1)


def row_sums(table: Tensor) -> Tensor:
    """The sum of each row's words, each times the number of its column."""
    columns = odd(0, ROW, table.device)
    if table.device.type != "cpu":  # products of matrices of whole numbers are written for CPUs alone
        return (table * columns).sum(1)
    if len(table) <= SMALL:
        return table.mv(columns)
    return torch.cat(on_threads(lambda rows: rows.mv(columns), table.chunk(torch.get_num_threads())))


def words(flat: Tensor) -> Tensor:
    """The bytes of a flat tensor as rows of words; the last row is filled up with zeros."""
    raw = flat.view(torch.uint8)
    if raw.numel() % (ROW * WORD):
        raw = pad(raw, (0, -raw.numel() % (ROW * WORD)))
    elif raw.storage_offset() % WORD:
        raw = raw.clone()
    return raw.view(torch.int64).view(-1, ROW)


def on_threads(do: Callable[[One], Other], items: Sequence[One]) -> list[Other]:
    """What becomes of each item, on as many threads as torch may use, where torch itself would use one."""
    threads = torch.get_num_threads()
    if min(threads, len(items)) < 2:
        return [do(each) for each in items]
    return list(_threads(threads).map(do, items))


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="checksums")


@lru_cache(maxsize=64)
def odd(first: int, count: int, device: torch.device) -> Tensor:
    """So many odd numbers, the same everywhere; those of rows are others than those of columns."""
    # 2^64 over the golden ratio, and then another mixer, so that neighbors have nothing in common.
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
