"""`stretto report RUN...`: runs on one page that opens from a file, and in words what a step waits for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli import render
from stretto.errors import RecipeError

MARKS = {"alarm": "!", "notice": "-", "fine": "+"}
"""Finding's level -> what its line begins with."""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; default: RUN/report.html, of several ./report.html.")
    ] = None,
    step: Annotated[
        list[int] | None, typer.Option(help="A step whose answers the page must hold; can be repeated.")
    ] = None,
    follow: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Write it again so often, while a run goes on.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also say what a step waits for, and what would help.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Write runs as one page: curves, answers token by token, timeline, predicted beside measured. Loads no PyTorch."""
    from stretto.report.html import ReportPage, page_path
    from stretto.report.read_run import RunRecord
    from stretto.runtime.live_page import write_report

    if follow is not None and follow <= 0:
        raise RecipeError.of("--follow", f"{follow:g} is no time to wait", "give seconds, such as --follow 10")
    path = page_path(runs, out)
    page = ReportPage(runs, steps=step or ())
    _refuse_unknown_steps([RunRecord(run) for run in runs], step or ())
    told = write_report(runs, path, page=page)
    if not json:
        render.screen(error=follow is not None).print(f"page     {path}")
    while follow is not None and any(RunRecord(run).alive for run in runs):
        time.sleep(follow)
        told = write_report(runs, path, page=page)
    if json:
        render.document({"ok": True, "page": str(path), "runs": told})
    elif explain:
        for run, each in zip(runs, told, strict=True):
            render.screen().print("\n".join(["", *lines(run, each)]))


def _refuse_unknown_steps(runs: Sequence[Any], steps: Sequence[int]) -> None:
    for step in steps:
        if not any(step in run.sampled for run in runs):
            there = sorted({each for run in runs for each in run.sampled})
            fix = f"ask for a step from {there[0]} to {there[-1]}" if there else "train it first"
            raise RecipeError.of("--step", f"no run here holds samples of step {step}", fix)


def lines(run: Path, told: Mapping[str, Any]) -> list[str]:
    """What is known of a run's speed, as lines."""
    found = [f"{run}"]
    for each in told["findings"]:
        found.append(f"  {MARKS[each['level']]} {render.plain(each['text'])}")
        if each["fix"]:
            found.append(f"      {render.plain(each['fix'])}")
    whole = sum(each["seconds"] for each in told["waits"])
    if whole:
        found.append(f"  a step, {whole:.3g} s, goes to")
        found += [
            f"    {each['seconds'] / whole:>5.0%}  {each['what']} ({each['seconds']:.3g} s)" for each in told["waits"]
        ]
    for index, each in enumerate(told["advice"]):
        found.append(f"  {'would help most' if not index else 'would help'}: {each['change']}")
        found.append(f"      {each['what']} {each['gain']}")
    return found
