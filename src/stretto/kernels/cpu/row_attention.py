"""Attention over a packed row on a CPU: by kernels in C where this machine has them, otherwise in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from stretto.kernels.cpu.attention_kernels import Stretches, attention_kernels
from stretto.kernels.cpu.tiled_attention import TiledRow
from stretto.kernels.cpu.tiles import QueryBlock, tiles_of


@dataclass(frozen=True, kw_only=True)
class RowAttention:
    """A row, and who sees whom in it."""

    blocks: Sequence[QueryBlock]
    """Every token is a query of one of them."""

    @cached_property
    def stretches(self) -> Stretches:
        """The blocks, as the kernels read them."""
        return Stretches.of(self.blocks)

    @cached_property
    def tiles(self) -> TiledRow:
        """The blocks side by side."""
        return TiledRow(tiles=tiles_of(self.blocks))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None) -> Tensor:
        """(1, H, T, D), (1, K, T, D), (1, K, T, D) -> (1, H, T, D)."""
        kernels = attention_kernels(query.dtype) if query.device.type == "cpu" else None
        if kernels is None or not kernels.serve(query, key, value):
            return self.tiles.attend(query, key, value, scale=scale, window=window)
        return kernels.attend(query, key, value, self.stretches, scale=scale or query.shape[3] ** -0.5, window=window)
