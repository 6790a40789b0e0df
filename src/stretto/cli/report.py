"""`stretto report RUN...`: one HTML page for some runs, and an explanation of their step time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli import render
from stretto.errors import RecipeError

MARKS = {"alarm": "!", "notice": "-", "fine": "+"}
"""Level of a finding -> first character of its line."""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[
        Path | None, typer.Option(help="Output file. Default: RUN/report.html, or ./report.html for several runs.")
    ] = None,
    step: Annotated[
        list[int] | None, typer.Option(help="Step whose completions the page includes. Repeatable.")
    ] = None,
    follow: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Rewrite the page every SECONDS while the run continues.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also print where step time goes and which change would help most.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, no other output.")] = False,
) -> None:
    """Write runs to one HTML page: curves, completions, timeline, predicted and measured times."""
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
            fix = f"use a step from {there[0]} to {there[-1]}" if there else "train it first"
            raise RecipeError.of("--step", f"no run here holds samples of step {step}", fix)


def lines(run: Path, told: Mapping[str, Any]) -> list[str]:
    """Format findings, waits and advice about a run as lines."""
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
