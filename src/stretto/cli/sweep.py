"""`stretto sweep RECIPE key=a,b ...`: one run for every combination of values, and a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from stretto.cli import render
from stretto.cli.train import in_good_order
from stretto.errors import RecipeError, StrettoError
from stretto.recipe.overrides import value_of_text

OPEN, CLOSE = "[{(", "]})"


def sweep(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of the recipe (YAML).")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE,VALUE]...", help="Values per key, e.g. seed=0,1,2; a single value applies to all runs."
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the runs. Default: a folder below runs/ named by the values.")
    ] = None,
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, help="Number of runs in parallel, each in a process.")
    ] = 1,
) -> None:
    """Train every combination of values. Repeat the command to continue a stopped sweep."""
    grid, fixed = grid_of(changes or ())
    if not grid:
        raise RecipeError.of(
            "arguments", "no key has several values", "separate values by commas, e.g. optimizer.lr=1e-5,1e-4"
        )
    from stretto.api.sweep import sweep as run_sweep

    with in_good_order():
        told = run_sweep(recipe, grid, changes=fixed, folder=folder, at_once=at_once)
    screen = render.screen()
    screen.print(render.plain(str(told)))
    screen.print(f"\npicture  {told.folder / 'sweep.svg'}")
    if told.failures:
        raise StrettoError(f"{len(told.failures)} of the runs failed: {', '.join(told.failures)}")


def grid_of(changes: list[str] | tuple[str, ...]) -> tuple[dict[str, list[Any]], list[str]]:
    """Split overrides into keys with several values and overrides for all runs."""
    grid: dict[str, list[Any]] = {}
    fixed: list[str] = []
    for change in changes:
        key, equals, text = change.partition("=")
        values = list(_split(text))
        if equals and len(values) > 1:
            grid[key.strip()] = [value_of_text(key.strip(), each) for each in values]
        else:
            fixed.append(change)
    return grid, fixed


def _split(text: str) -> Iterator[str]:
    """Split at commas that stand in no brackets or quotes."""
    depth, quote, start = 0, "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in OPEN:
            depth += 1
        elif char in CLOSE:
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]
