"""Tensors in a file that two processes map: how weights reach an engine, and how its own come back to be compared.

A bucket holds many tensors in a row, with a table that says where each is; nothing is pickled, and a table that does
not fit its file is refused. The engine's own Python reads this file too, so it imports nothing of the project.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALIGNED = 64
"""Each tensor begins at a multiple of so many bytes."""

Row = Sequence[Any]
"""[name, type, shape, first byte]; a table is a list of these."""


def write_bucket(path: Path, tensors: Mapping[str, Tensor]) -> list[Row]:
    """Writes tensors into a file; returns the table. An OSError where there is no room for it."""
    table: list[Row] = []
    size = 0
    for name, tensor in tensors.items():
        table.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size])
        size += -(-tensor.nbytes // ALIGNED) * ALIGNED
    with path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):  # where memory has no room for a page, writing to it would end the process
            os.posix_fallocate(file.fileno(), 0, max(size, ALIGNED))
        else:
            file.truncate(max(size, ALIGNED))
    for (_, mapped), tensor in zip(read_bucket(path, table), tensors.values(), strict=True):
        mapped.copy_(tensor.detach())
    return table


def rank_file(path: Path, rank: int) -> Path:
    """Where one of several ranks writes its tensors."""
    return path.with_name(f"{path.name}.{rank}")


def read_ranks(path: Path, tables: Sequence[Sequence[Row]]) -> list[dict[str, Tensor]]:
    """What each rank has written; the files are gone, and the memory is as soon as nobody looks at it."""
    found = []
    for rank, table in enumerate(tables):
        mine = rank_file(path, rank)
        found.append(dict(read_bucket(mine, table)) if table else {})
        mine.unlink(missing_ok=True)
    return found


def read_bucket(path: Path, table: Sequence[Row]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, where they lie: what is written into them is seen by whoever maps it too."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    for name, kind, shape, start in table:
        dtype, count = getattr(torch, kind), math.prod(shape)
        if start < 0 or start + count * dtype.itemsize > len(memory):
            raise ValueError(f"the table of {path.name} does not fit its file, at {name}")
        if count:
            yield name, torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)
        else:
            yield name, torch.empty(shape, dtype=dtype)
