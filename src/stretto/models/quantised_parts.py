"""A process's part of a matrix in few bits, whose weights are those of the whole matrix to the bit.

Nothing is rounded anew: codes stay the same codes, and each is read with the very scale that it was stored with. In
int8 and fp8 a row has a scale, so whoever has some of its weights has that scale. In NF4 blocks of 64 weights follow
each other through the rows, past their ends. A part is taken in runs, which never reach from one block into the next,
and has the byte of a scale for each: as many as the whole where widths are multiples of 64, and otherwise more. What
these bytes are scaled by is little, and all of it is everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from stretto.models.few_bits import (
    BLOCK,
    FORMATS,
    NESTED,
    Factors,
    Reading,
    Stored,
    dynamic_code,
    read_nf4,
    scales_of_scales,
)
from stretto.models.parameter_cut import ParameterCut
from stretto.models.quantised import QuantisedExperts, QuantisedLinear


class StoredPart(Reading, Protocol):
    """Which bytes of a matrix are here, and how they are read."""

    def weight(self, full: Tensor) -> Tensor:
        """This part of the codes of the whole."""
        ...

    def scales(self, full: Tensor) -> Tensor:
        """This part of its scales."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PartByRows:
    """Of a matrix in int8 or fp8."""

    kind: str
    """Which of them."""
    shape: tuple[int, int]
    """Of the whole."""
    cut: ParameterCut
    """What of it is here."""

    def weight(self, full: Tensor) -> Tensor:
        """A byte for each weight."""
        return self.cut.part(full.view(self.shape)).flatten()

    def scales(self, full: Tensor) -> Tensor:
        """Four bytes for each row."""
        return full if self.cut.dim else self.cut.part(full.view(-1, 4)).flatten()

    def wide(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """As the whole is read."""
        return FORMATS[self.kind].wide(stored, shape, dtype)

    def factors(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype) -> Factors:
        """As those of the whole."""
        return FORMATS[self.kind].factors(stored, shape, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartByRuns(StoredPart):
    """Of a matrix in NF4."""

    shape: tuple[int, int]
    """Of the whole."""
    cut: ParameterCut
    """What of it is here."""

    @property
    def run(self) -> int:
        """How many weights there are in a run: the most that every edge of the part and of a block lies between."""
        rows, width = self.shape
        return gcd(BLOCK, self.cut.run(width) if self.cut.dim else self.cut.run(rows) * width)

    def runs(self, device: torch.device) -> Tensor:
        """Which runs of the whole are here, in their order."""
        rows = self.shape[0] if self.cut.dim else self.cut.blocks * self.cut.size
        width = prod(self.shape) // self.run // rows
        places = [
            self.cut.numbers(count, device) if dim == self.cut.dim else torch.arange(count, device=device)
            for dim, count in enumerate((rows, width))
        ]
        return (places[0][:, None] * width + places[1]).flatten()

    def weight(self, full: Tensor) -> Tensor:
        """Two codes in a byte."""
        codes = torch.stack([full >> 4, full & 15], -1).flatten()[: prod(self.shape)]
        here = codes.view(-1, self.run)[self.runs(full.device)].flatten()
        upper, lower = pad(here, (0, len(here) % 2)).view(-1, 2).unbind(-1)
        return upper << 4 | lower

    def scales(self, full: Tensor) -> Tensor:
        """A byte for each run, after what all of these are scaled by."""
        *_, narrow = scales_of_scales(full, prod(self.shape))
        here = narrow[self.runs(full.device) * self.run // BLOCK]
        return pad(torch.cat([full[: len(full) - len(narrow)], here]), (0, -len(here) % 4))  # words stay words

    def wide(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """As the whole is read, with the scale of each run."""
        largest, offset, narrow = scales_of_scales(stored.scales, prod(self.shape))
        runs = self.runs(narrow.device)
        scales = dynamic_code(narrow.device)[narrow[: len(runs)].int()]
        scales = scales.mul_(largest[runs // (BLOCK * NESTED // self.run)]).add_(offset)
        if self.run == BLOCK:
            return read_nf4(stored.weight, scales, shape, dtype)
        plain = read_nf4(stored.weight, scales.new_ones(-(-prod(shape) // BLOCK)), shape, torch.float32)
        return plain.view(-1, self.run).mul_(scales[:, None]).view(shape).to(dtype)


def keep_part(held: QuantisedLinear | QuantisedExperts, cut: ParameterCut) -> dict[str, Callable[[Tensor], Tensor]]:
    """Leaves a layer this process's part of its matrix, or experts theirs of each matrix: what its parameters are made
    of those of the whole by."""
    part: StoredPart = (
        PartByRuns(shape=held.shape, cut=cut)
        if held.kind == "nf4"
        else PartByRows(kind=held.kind, shape=held.shape, cut=cut)
    )
    ways = {"weight": _of_each(part.weight), "scales": _of_each(part.scales)}
    for name, way in ways.items():
        weight = getattr(held, name)
        weight.data = way(weight.detach()).clone(memory_format=torch.contiguous_format)
    rows, width = held.shape
    held.shape = (rows, width // cut.size) if cut.dim else (rows // cut.size, width)
    held.reading = part
    return ways


def _of_each(take: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same for the matrix of a layer, and for those of experts, one after the other."""
    return lambda full: take(full) if full.dim() == 1 else torch.stack([take(each) for each in full])
