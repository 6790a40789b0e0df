"""`stretto doctor [RECIPE]`: checks of this machine, each with a result and a fix."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from stretto.api.recipes import open_recipe
from stretto.cli import render
from stretto.recipe.load import folder_of


def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="Path of the recipe to check for. Default: the machine alone."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override, e.g. model.adapter=null."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, no other output.")] = False,
) -> None:
    """Check that this machine can run a recipe. Loads no model; exits with 1 after a failed check."""
    from stretto.checks.doctor import examined

    opened = None if recipe is None else open_recipe(recipe, changes or (), deep=False)
    checks = examined(opened, root=Path.cwd() if recipe is None else folder_of(recipe))
    wrong = sum(not check.ok for check in checks)
    if json:
        told = [{key: value for key, value in asdict(check).items() if key != "silent"} for check in checks]
        render.document({"ok": not wrong, "checks": told})
    else:
        page, width = Text(), max(len(check.name) for check in checks)
        for check in checks:
            mark, style = ("ok", "green") if check.ok else ("!!", "red")
            page.append(f"{mark}  ", style=style).append(f"{check.name:<{width}}  {render.plain(check.text)}\n")
            if check.fix is not None:
                page.append(" " * (width + 6)).append(f"fix: {render.plain(check.fix)}\n", style="green")
        verdict = f"{wrong} of {len(checks)} checks failed" if wrong else "nothing wrong was found"
        render.screen().print(page.append(f"\n{verdict}", style="red" if wrong else "green"))
    if wrong:
        raise typer.Exit(1)
