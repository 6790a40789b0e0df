"""`stretto compare RUN RUN ...`: differences between runs, and their statistical significance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import render
from stretto.errors import RecipeError
from stretto.report.compare_runs import compare as compare_runs
from stretto.report.read_run import RunRecord


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Run folders, at least two.")],
) -> None:
    """Compare runs: recipe keys, accuracy with exact tests, reward, step time, memory."""
    if len(runs) < 2:
        raise RecipeError.of("RUN", "is only one run", "name two runs or more")
    render.screen().print(str(compare_runs([RunRecord(run) for run in runs])))
