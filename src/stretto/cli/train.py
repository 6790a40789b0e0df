"""`stretto train RECIPE` and `stretto resume RUN`: from a recipe to a run folder."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from stretto.cli import render
from stretto.cli.recipe import check_changed, check_deeply, folder_of, open_recipe
from stretto.recipe.schema import Recipe

Changes = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as run.steps=80.")
]


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    changes: Changes = None,
) -> None:
    """Train what a recipe describes, in a run folder of its own."""
    _once(f"train {recipe}")
    _outlive_terminal()
    opened = open_recipe(recipe, changes or (), deep=False)
    _fit(opened, folder_of(recipe))
    check_deeply(opened, folder_of(recipe))
    from stretto.runtime.session import start

    start(opened, name=recipe.stem, root=folder_of(recipe))


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    changes: Changes = None,
    allow: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="A key of the recipe that may differ; can be repeated.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin again at step 0; what the run has made so far is set aside.")
    ] = False,
) -> None:
    """Go on with a run where its newest checkpoint stands."""
    _once(f"resume {run}")
    _outlive_terminal()
    from stretto.runtime.recipe_file import recipe_of
    from stretto.runtime.session import resume as go_on

    recipe, root = recipe_of(run, changes or ())
    check_changed(recipe, root)
    _fit(recipe, root)
    allowed = [key for given in allow or () for key in given.split(",")]
    go_on(run, changes=changes or (), allow=allowed, restart=restart)


def _once(command: str) -> None:
    """Ends copies of the command that a launcher started beside this one; the first of them says why."""
    from stretto.cli.torchrun import first_of

    if not first_of(os.environ, command=command):
        raise typer.Exit


def _outlive_terminal() -> None:
    """Has a terminal that is closed not end the run, nor the processes that it starts. Ctrl-C is as ever."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _fit(recipe: Recipe, root: Path) -> None:
    """Refuses a machine on which the run could not go well; says what of it would have no work."""
    from stretto.checks.doctor import admit

    for remark in admit(recipe, root=root):
        render.note(remark)
