"""`stretto train RECIPE` and `stretto resume RUN`: from a recipe to a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stretto.cli.recipe import check_changed, folder_of, open_recipe

Changes = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as run.steps=80.")
]


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    changes: Changes = None,
) -> None:
    """Train what a recipe describes, in a run folder of its own."""
    opened = open_recipe(recipe, changes or (), deep=True)
    from stretto.run.session import start

    start(opened, name=recipe.stem, root=folder_of(recipe))


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    changes: Changes = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="A key of the recipe that may differ; can be repeated.")
    ] = None,
) -> None:
    """Go on with a run where its newest checkpoint stands."""
    from stretto.run.session import recipe_of
    from stretto.run.session import resume as go_on

    check_changed(*recipe_of(run, changes or ()))
    go_on(run, changes=changes or (), allow=[key for given in allow or () for key in given.split(",")])
