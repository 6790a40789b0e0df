"""`stretto.compare`: what differs between runs, and whether it is more than chance."""

from __future__ import annotations

import os

from stretto.api.run import Run
from stretto.api.targets import place_of
from stretto.report.compare_runs import RunComparison
from stretto.report.compare_runs import compare as compare_runs
from stretto.report.read_run import RunRecord


def compare(*runs: str | os.PathLike[str] | Run) -> RunComparison:
    """Runs or their folders beside each other, in the order in which they are given; `print` shows a page."""
    return compare_runs([RunRecord(place_of(run)) for run in runs])
