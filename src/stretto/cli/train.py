"""`stretto train RECIPE`, `sft`, `reward-model` and `stretto resume RUN`: start or continue a run."""

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
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override, e.g. run.steps=80.")
]


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of the recipe (YAML).")],
    changes: Changes = None,
) -> None:
    """Train a recipe in a new run folder."""
    with in_good_order():
        api.train(recipe, changes=changes or (), note=render.note)


def sft(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of the recipe (YAML).")],
    changes: Changes = None,
) -> None:
    """Fine-tune on the answers in the data (SFT) in a new run folder."""
    with in_good_order():
        supervised.sft(recipe, changes=changes or (), note=render.note)


def reward_model(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Path of the recipe (YAML).")],
    changes: Changes = None,
) -> None:
    """Train a reward model on preference pairs in a new run folder."""
    with in_good_order():
        supervised.reward_model(recipe, changes=changes or (), note=render.note)


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    changes: Changes = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Recipe key or input that may differ from the run. Repeatable."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start again at step 0 and move earlier results aside.")
    ] = False,
) -> None:
    """Resume a run from its newest valid checkpoint."""
    allowed = [key for given in allow or () for key in given.split(",")]
    with in_good_order():
        api.resume(run, changes=changes or (), allow=allowed, restart=restart, note=render.note)


@contextmanager
def in_good_order() -> Iterator[None]:
    """Print the state of an interrupted run and its resume command as the last lines."""
    try:
        with ended_by_signals():
            yield
    except RunStopped as stopped:  # Typer would turn every interruption into exit code 130.
        render.screen(error=True).print(render.plain(str(stopped)), style="yellow")
        raise typer.Exit(stopped.exit_code) from stopped
