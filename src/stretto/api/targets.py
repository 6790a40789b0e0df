"""What a call is about: a run, its folder, or a recipe; and how its model is asked."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from stretto import threads
from stretto.api.recipes import check_changed, open_recipe
from stretto.api.run import Run
from stretto.recipe.load import Changes, RecipeSource, folder_of
from stretto.runtime.recipe_changes import refuse_asking
from stretto.runtime.recipe_file import load_run_recipe

T = TypeVar("T")

Target = RecipeSource | Run
"""A run or its folder; or a recipe, whose model is asked as it is before training."""


def ask(target: Target, question: Callable[[Any], Awaitable[T]], *, changes: Changes, note: Callable[[str], None]) -> T:
    """What the model of a run or of a recipe answers, judged by nobody."""
    if (place := run_folder(target)) is not None:
        before, root = load_run_recipe(place)
        recipe, _ = load_run_recipe(place, changes)
        refuse_asking(before, recipe)
        from stretto.runtime.answers import only_sampling
        from stretto.runtime.questions import ask_run

        recipe = only_sampling(recipe)
        check_changed(recipe, root, training=False)
        return threads.outside_loops(ask_run, place, recipe, root, question, note=note, judged=False)
    source = source_of(target)
    root, opened = folder_of(source), open_recipe(source, changes, deep=True, training=False)
    from stretto.runtime.answers import only_sampling
    from stretto.runtime.questions import ask_recipe

    recipe = only_sampling(opened)
    return threads.outside_loops(ask_recipe, recipe, root, question, note=note, judged=False)


def run_folder(target: Target) -> Path | None:
    """The folder of a run, none if it is a recipe."""
    if isinstance(target, Run):
        return target.folder
    path = Path(target) if isinstance(target, str | os.PathLike) else None
    return path if path is not None and path.is_dir() else None


def place_of(folder: str | os.PathLike[str] | Run) -> Path:
    return folder.folder if isinstance(folder, Run) else Path(folder)


def source_of(target: Target) -> RecipeSource:
    assert not isinstance(target, Run)
    return target
