"""`stretto compare RUN RUN ...`: what differs between runs, and whether it is more than chance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import render
from stretto.errors import RecipeError
from stretto.report.compare_runs import compare as compare_runs
from stretto.report.read_run import RunRecord


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Folders of runs, two or more.")],
) -> None:
    """Say what differs between runs: keys, accuracy, reward, seconds, memory; and whether chance would have done it."""
    if len(runs) < 2:
        raise RecipeError.of("RUN", "is only one run", "name two runs or more")
    render.screen().print(str(compare_runs([RunRecord(run) for run in runs])))
