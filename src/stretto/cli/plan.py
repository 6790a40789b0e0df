"""`stretto plan RECIPE`: where the models should live on a cluster and what a step will take, before anything starts.

It reads the recipe and loads no torch, unless it is to measure. Everything else that is printed is a forecast of the
cost model, with the constants that were measured on this machine where there are any.
"""

from __future__ import annotations

import json as format_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stretto.cli import render
from stretto.cli.recipe import folder_of, open_recipe, recipe_to_plan
from stretto.errors import RecipeError
from stretto.placement.build import OPEN
from stretto.placement.cluster import Cluster, parse_cluster
from stretto.placement.devices import DEVICES
from stretto.placement.strategies import STRATEGIES
from stretto.recipe.load import cluster_path
from stretto.recipe.schema import Recipe
from stretto.report.timeline import Span, to_events

if TYPE_CHECKING:
    from stretto.planner.problem import PlanningProblem
    from stretto.planner.search import SearchResult


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
    from stretto.planner import explain
    from stretto.planner.forecast import setting_of
    from stretto.planner.search import named_by, search, smallest_cluster, variants_of

    if strategy not in (None, *STRATEGIES):
        raise RecipeError.of("--strategy", f"there is no strategy {strategy!r}", f"use one of {', '.join(STRATEGIES)}")
    root = folder_of(recipe)
    opened = open_recipe(recipe, changes or (), deep=False) if measure else recipe_to_plan(recipe, changes or ())
    if cluster is not None:
        opened = _placed(opened, cluster_path(cluster, root))
    if measure:
        from stretto.runtime.precision import settled

        opened = settled(opened, root, render.note)
    there = _cluster(opened)
    setting = setting_of(opened, root, there, running=measure)
    variants = variants_of(opened.placement, strategy)
    found = search(setting, variants)
    if not found.best:
        raise _nothing(found, setting, smallest_cluster(setting, variants))
    measured: dict[str, float] = {}
    if measure:
        measured = _measured(opened, root, setting, found)
        setting = setting_of(opened, root, there, running=measure)
        found = search(setting, variants)
    if timeline is not None:
        _write(timeline, planned.spans(found.best[0]))
    if json:
        render.document(explain.document(found, setting) | ({"measured": measured} if measure else {}))
    else:
        render.screen().print(planned.page(found, setting, named_by(opened.placement), measured), end="")


def _placed(recipe: Recipe, cluster: str) -> Recipe:
    """The recipe on the cluster of the command line."""
    return recipe.model_copy(update={"placement": recipe.placement.model_copy(update={"cluster": cluster})})


def _measured(recipe: Recipe, root: Path, setting: PlanningProblem, found: SearchResult) -> dict[str, float]:
    """Takes steps, keeps the constants that follow from them, and returns what the recipe's own plans took."""
    from stretto.bench.measure import measure
    from stretto.planner.saved_calibration import keep

    told = render.screen(error=True)
    result = measure(recipe, root, setting, found, note=lambda text: told.print(render.plain(text), style="dim"))
    path = keep(result.kept)
    told.print(
        f"constants of {result.kept.steps} steps: the seconds of lanes and stages are told to {result.kept.error:.0%} "
        f"(before: {result.before:.0%}); kept in {path}"
    )
    return dict(result.seconds)


def _nothing(found: SearchResult, setting: PlanningProblem, count: int | None) -> RecipeError:
    """No plan at all: why, and the smallest cluster that has one."""
    from stretto.planner.search import LARGEST, roomiest

    told = found.misses or tuple(f"{name}: {why}" for name, why in found.rejected)
    kind = roomiest(setting).device.name
    fix = "use a smaller model, an adapter, shorter answers or other devices"
    if count is None:
        fix = f"no cluster of up to {LARGEST} x {kind} would hold it either; {fix}"
    else:
        fix = f"{'--cluster ' if kind in DEVICES else ''}{count}x{kind} would hold it; or {fix}"
    return RecipeError.of("placement.cluster", f"nothing fits on {setting.cluster}. {'; '.join(told)}", fix)


def _cluster(recipe: Recipe) -> Cluster:
    """The recipe's cluster, which must say which devices there are."""
    text = recipe.placement.cluster
    if text in OPEN:
        fix = "say which devices, such as --cluster 8xH100"
        raise RecipeError.of("placement.cluster", f"{text} does not say which devices there would be", fix)
    return parse_cluster(text)


def _write(path: Path, spans: list[Span]) -> None:
    """A Chrome trace, as a run's timeline.json."""
    try:
        path.write_text(format_json.dumps({"displayTimeUnit": "ms", "traceEvents": to_events(spans, "plan")}), "utf-8")
    except OSError as error:
        raise RecipeError.of("--timeline", f"{path} cannot be written: {error.strerror}", "name another file") from None
