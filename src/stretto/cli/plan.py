"""`stretto plan RECIPE`: where the models should live on a cluster and what a step will take, before anything starts.

It reads the recipe and loads no torch, unless it is to measure. Everything else that is printed is a forecast of the
cost model, with the constants that were measured on this machine where there are any.
"""

from __future__ import annotations

import json as format_json
from pathlib import Path
from typing import Annotated

import typer

from stretto.api import calls as api
from stretto.cli import render
from stretto.errors import RecipeError
from stretto.report.timeline import Span, to_events


def plan(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as batch.samples=4.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="The devices, such as 8xH100 or 6x8xH100, or a file; default: the recipe's.")
    ] = None,
    strategy: Annotated[str | None, typer.Option(help="Only this strategy.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write the best plan's timeline to this file.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run the best plans and correct the constants.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Say where the models should live on a cluster, what fits, and what a step will take. Loads no PyTorch."""
    from stretto.cli import planned
    from stretto.planner.search import named_by

    told = api.plan(
        recipe, cluster=cluster, strategy=strategy, changes=changes or (), measure=measure, note=render.note
    )
    if timeline is not None:
        _write(timeline, planned.spans(told.found.best[0]))
    if json:
        render.document(told.document())
    else:
        named = named_by(told.recipe.placement, len(told.setting.names))
        render.screen().print(planned.page(told.found, told.setting, named, told.measured), end="")


def _write(path: Path, spans: list[Span]) -> None:
    """A Chrome trace, as a run's timeline.json."""
    try:
        path.write_text(format_json.dumps({"displayTimeUnit": "ms", "traceEvents": to_events(spans, "plan")}), "utf-8")
    except OSError as error:
        raise RecipeError.of("--timeline", f"{path} cannot be written: {error.strerror}", "name another file") from None
