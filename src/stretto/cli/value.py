"""`stretto value RECIPE`: estimate V* of every training prompt once, for A*PO."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stretto.algorithms.catalog import facts_of
from stretto.api.recipes import open_recipe
from stretto.cli import render
from stretto.errors import RecipeError
from stretto.recipe.load import folder_of


def value(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of the recipe (YAML).")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override, e.g. algorithm.name=astar_po."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, no other output.")] = False,
) -> None:
    """Estimate V* of every training prompt for A*PO with the reference model. Resumable."""
    opened = open_recipe(recipe, changes or (), deep=True, training=False)
    if "vstar" not in facts_of(opened.algorithm.name).needs:
        reason = f"{opened.algorithm.name} reads no V* table"
        raise RecipeError.of("algorithm.name", reason, "use astar_po")
    from stretto.report.console import SilentProgress
    from stretto.runtime.value import value as make

    made = make(opened, root=folder_of(recipe), progress=SilentProgress() if json else None)
    if json:
        render.document(asdict(made))
        return
    answers = f"{made.prompts} prompts x {made.samples} answers, {made.tokens:,} tokens in all"
    lines = [
        f"table    {made.table}",
        f"holds    {answers}; {made.generated} answers are new, {made.seconds:.0f} s",
        f"reward   {made.reward_mean:.3f} on average, V* {made.value_mean:.3f}",
        f"alike    {made.alike} prompts whose answers all got the same reward",
    ]
    lines += [f"dropped  {made.unjudged} prompts without a score"] if made.unjudged else []
    render.screen().print("\n".join(lines))
