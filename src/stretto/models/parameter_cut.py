"""Which part of a parameter a process has, where a model is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCut:
    """Equal parts along one dimension, and which of them is here."""

    dim: int
    """Along which it is cut."""
    blocks: int = 1
    """Equal blocks along it that are cut one by one: gate and up of experts lie in one tensor."""
    rank: int
    """Which part."""
    size: int
    """Of how many."""

    def part(self, full: Tensor) -> Tensor:
        """This part of the whole."""
        parts = [block.chunk(self.size, self.dim)[self.rank] for block in full.chunk(self.blocks, self.dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole of the parts, in the order of their ranks."""
        blocks = zip(*(part.chunk(self.blocks, self.dim) for part in parts), strict=True)
        return torch.cat([piece for block in blocks for piece in block], self.dim)

    def numbers(self, count: int, device: torch.device) -> Tensor:
        """Which of so many places along its dimension are here."""
        return replace(self, dim=0).part(torch.arange(count, device=device))

    def run(self, width: int) -> int:
        """How many places along its dimension lie one after the other in here, of so many in all."""
        return width // self.blocks // self.size
