"""What a program for a task of ARC is worth: it is called with every input grid, and its grids are compared here.

The program gets the inputs and never the outputs. Three things can count: that it makes any grid at all, how many cells
are right, and how many grids are right in every cell. See the guide on ARC for what that invites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.errors import VerdictError
from stretto.rewards.program import program_in
from stretto.sandbox.isolated.programs import Sandbox
from stretto.sandbox.isolated.records import Calls, ProgramLimits

Grid = Sequence[Sequence[int]]

FUNCTION = "transform"
"""What the program calls its function."""
LARGEST, COLORS = 30, 10
"""Cells of a side, and colors, of any grid in ARC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridScore:
    """How a program did on the pairs of a task, each between 0 and 1."""

    valid: float
    """1 if it made a grid from any input."""
    cells: float
    """The share of right cells, averaged over the pairs; a grid of the wrong size has none."""
    right: float
    """The share of pairs whose grid is right in every cell."""

    def reward(self, *, valid: float, cells: float) -> float:
        """These two weighed so, and what is left to 1 for grids that are right."""
        return valid * self.valid + cells * self.cells + (1.0 - valid - cells) * self.right


NOTHING = GridScore(valid=0.0, cells=0.0, right=0.0)


async def grid_score(
    answer: str, pairs: Sequence[tuple[Grid, Grid]], sandbox: Sandbox, limits: ProgramLimits
) -> GridScore:
    """How the program in an answer does on (input, output) pairs. VerdictError where the sandbox broke."""
    program = program_in(answer)
    if program is None:
        return NOTHING
    calls = Calls(function=FUNCTION, arguments=[[given] for given, _ in pairs])
    result = await sandbox.run_program(program, calls=calls, limits=limits)
    if result.verdict == "infra":
        raise VerdictError(f"the sandbox broke: {result.detail}")
    made = [call.value if call.verdict == "ok" and is_grid(call.value) else None for call in result.calls]
    outputs = [output for _, output in pairs]
    return GridScore(
        valid=float(any(grid is not None for grid in made)),
        cells=sum(map(cells_right, made, outputs)) / len(pairs),
        right=sum(cells_right(grid, output) == 1.0 for grid, output in zip(made, outputs, strict=True)) / len(pairs),
    )


def is_grid(value: Any) -> bool:
    """True for a rectangle of colors that a task of ARC could have."""
    if not isinstance(value, list) or not 1 <= len(value) <= LARGEST or not isinstance(value[0], list):
        return False
    width = len(value[0])
    return 1 <= width <= LARGEST and all(
        isinstance(row, list) and len(row) == width and all(type(cell) is int and 0 <= cell < COLORS for cell in row)
        for row in value
    )


def cells_right(made: Grid | None, output: Grid) -> float:
    """The share of cells that are as they should be; none of a grid of another size."""
    if made is None or len(made) != len(output) or len(made[0]) != len(output[0]):
        return 0.0
    cells = [
        one == other for mine, theirs in zip(made, output, strict=True) for one, other in zip(mine, theirs, strict=True)
    ]
    return sum(cells) / len(cells)
