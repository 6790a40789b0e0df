"""`stretto doctor [RECIPE]`: is this machine fit for it, one sentence per check, and what to do where it is not."""

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
        Path | None, typer.Argument(metavar="RECIPE", help="The recipe that would be run; without one, the machine.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as model.adapter=null.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Check whether this machine is fit for a recipe. Loads nothing heavy; exit code 1 if something is wrong."""
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
