"""`stretto train RECIPE`, `sft`, `reward-model` and `stretto resume RUN`: from a recipe to a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from stretto.api import calls as api
from stretto.api import supervised
from stretto.cli import render
from stretto.errors import RunStopped
from stretto.runtime.interrupt import ended_by_signals

Changes = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to it, such as run.steps=80.")
]


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    changes: Changes = None,
) -> None:
    """Train what a recipe describes, in a run folder of its own."""
    with in_good_order():
        api.train(recipe, changes=changes or (), note=render.note)


def sft(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    changes: Changes = None,
) -> None:
    """Imitate the answers in the data (supervised fine-tuning), in a run folder of its own."""
    with in_good_order():
        supervised.sft(recipe, changes=changes or (), note=render.note)


def reward_model(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")],
    changes: Changes = None,
) -> None:
    """Train a reward model on pairs of a better and a worse answer, in a run folder of its own."""
    with in_good_order():
        supervised.reward_model(recipe, changes=changes or (), note=render.note)


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
    allowed = [key for given in allow or () for key in given.split(",")]
    with in_good_order():
        api.resume(run, changes=changes or (), allow=allowed, restart=restart, note=render.note)


@contextmanager
def in_good_order() -> Iterator[None]:
    """A run that was asked to end says where it stands and how to go on, as the last thing that it says."""
    try:
        with ended_by_signals():
            yield
    except RunStopped as stopped:  # told here, because typer makes one thing of all interruptions
        render.screen(error=True).print(render.plain(str(stopped)), style="yellow")
        raise typer.Exit(stopped.exit_code) from stopped
