"""`stretto eval RUN|RECIPE`: how good a model is on the held-out prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import render
from stretto.cli.recipe import check_changed, folder_of, open_recipe


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN|RECIPE", help="A run's folder, or a recipe.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Ask the held-out prompts: a run's newest checkpoint, or the model of a recipe before training."""
    from stretto.runtime.evaluate import of_asked
    from stretto.runtime.recipe_file import recipe_of
    from stretto.runtime.session import evaluate_recipe, evaluate_run

    if target.is_dir():
        check_changed(*recipe_of(target, changes or ()))
        result = evaluate_run(target, changes=changes or (), note=render.note)
    else:
        opened = open_recipe(target, changes or (), deep=True, training=False)
        result = evaluate_recipe(opened, root=folder_of(target), note=render.note)
    if json:
        render.document(result.document())
        return
    low, high = result.interval
    lines = [f"accuracy     {result.accuracy:.3f}  (95 % interval {low:.3f} to {high:.3f}, {result.prompts})"]
    for k, chance in result.pass_at_k.items():
        over = "" if result.pass_n[k] == result.asked else f"  ({of_asked(result.pass_n[k], result.asked)})"
        lines.append(f"pass@{k:<7} {chance:.3f}{over}")
    lines.append(f"mean length  {result.length_mean:.1f} tokens")
    if result.failure is not None:
        lines.append(f"the first answer without a verdict: {render.plain(result.failure)}")
    render.screen().print("\n".join(lines))
