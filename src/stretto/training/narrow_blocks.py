"""Blocks of numbers that share a scale in `adamw8bit`, from sizes alone. No PyTorch: recipes are checked with it."""

from __future__ import annotations

from stretto.errors import Problem

BLOCK = 256
"""Most numbers of a row that share a scale."""

SMALL = 4096
"""Below this many numbers moments stay wide, as in bitsandbytes: norms and biases, which are few and matter."""

LEAST = 16
"""A row whose blocks would be shorter keeps wide moments: its scales would take as much."""


def block_of(width: int) -> int:
    """The largest number up to `BLOCK` that divides the width of a row."""
    return next(size for size in range(min(BLOCK, width), 0, -1) if width % size == 0)


def cut_block(name: str, *, numbers: int, width: int, run: int, field: str = "optimizer.name") -> Problem | None:
    """The problem of rows of `width` numbers that are cut into runs of `run`; `None` if blocks stay whole."""
    block = block_of(width)
    if numbers < SMALL or block < LEAST or run % block == 0:
        return None
    reason = f"{name} is cut into pieces of {run} numbers, and {block} share a scale"
    return Problem(field=field, reason=reason, fix="use adamw16bit or adamw, or a smaller tp")
