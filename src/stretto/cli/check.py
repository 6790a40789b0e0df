"""`stretto check RECIPE`: explain a recipe, or list everything that is wrong with it. Starts no run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from stretto.api.recipes import data_words, not_at_hand, open_recipe
from stretto.checks.machine.devices import shared_cores
from stretto.checks.machine.facts import cores
from stretto.cli import render
from stretto.models.source import width_of
from stretto.recipe.describe import batch_sentence, changes_of, objective, plan_sentence
from stretto.recipe.load import folder_of
from stretto.recipe.resolve import dump
from stretto.recipe.schema import Recipe


def check(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of the recipe (YAML).")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override, e.g. batch.samples=4."),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also check the tokenizer, prompt lengths and adapter targets.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, no other output.")] = False,
) -> None:
    """Validate a recipe and explain it. Loads no weights; takes a second without --deep."""
    opened = open_recipe(recipe, changes or (), deep=deep)
    root = folder_of(recipe)
    step = f"{batch_sentence(opened)}; {data_words(opened, root, deep=deep)}"
    if json:
        render.document(
            {
                "ok": True,
                "problems": [],
                "objective": objective(opened),
                "batch": step,
                "recipe": opened.model_dump(mode="json"),
            }
        )
    else:
        render.screen().print(_page(opened, root, step))


def _page(recipe: Recipe, root: Path, step: str) -> Text:
    """Format the resolved recipe, its non-default keys, its meaning, and the parts that could not be checked."""
    differing = [
        f"{name}: {render.shown(value)}  (default {render.shown(default)})"
        for name, value, default in changes_of(recipe, partial(width_of, root=root))
    ]
    page = Text()
    for title, body in (
        ("recipe", dump(recipe)),
        ("not the default", "\n".join(differing) or "nothing"),
        ("objective", objective(recipe)),
        ("a step", step.replace("; ", "\n")),
        ("plan", plan_sentence(recipe)),
    ):
        page.append(f"{title}\n", style="bold")
        page.append("".join(f"  {line}\n" for line in render.plain(body).splitlines())).append("\n")
    if shared := shared_cores(recipe.placement, cores()):
        page.append(f"note: {shared}\n", style="yellow")
    for what in (unread := not_at_hand(recipe, root)):
        page.append(f"not looked at: {what}\n", style="yellow")
    return page.append("nothing wrong was found in the rest" if unread else "nothing wrong was found", style="green")
