"""Imports the code that a recipe names by module:name, before anything is loaded for it, and says what is wrong there.

The first tier (`checks.rules.own_code`) has only read the files. Rewards are left to their own processes, which import
them when they are first needed; environments that run in host processes to these.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stretto import plugins
from stretto.algorithms.base import build
from stretto.algorithms.own_facts import announce
from stretto.environments import adapted
from stretto.errors import Problem, RecipeError
from stretto.recipe.schema import OwnEnvironmentSection, Recipe


def import_plugins(recipe: Recipe, root: Path, *, training: bool = True) -> None:
    """RecipeError with everything that is wrong. Afterwards the facts of the recipe's algorithm are known."""
    if problems := list(plugin_problems(recipe, root, training=training)):
        raise RecipeError(*problems)


def plugin_problems(recipe: Recipe, root: Path, *, training: bool = True) -> Iterator[Problem]:
    """What importing shows, and what building the algorithm shows. Without `training`, nothing that a model which is
    only asked does without is imported."""
    folders, seconds = plugins.folders_of(root), recipe.deadlines.start
    wrong = announce(recipe.algorithm.name, folders)
    yield from wrong if training else ()
    for kind, field, name in plugins.plugins_of(recipe, training=training):
        try:
            if kind == "algorithm" and not wrong:
                yield from _too_few(recipe, build(recipe.algorithm, folders, seconds=seconds).min_samples)
            elif kind == "environment" and getattr(recipe.environment, "hosts", "auto") not in ("auto", 0):
                continue  # its own processes import it
            elif kind != "algorithm":
                found = plugins.resolve(kind, name, folders, field=field, seconds=seconds)
                if isinstance(recipe.environment, OwnEnvironmentSection) and kind == "environment":
                    adapted(found, turns=recipe.environment.turns)  # a class of tools says here what its tools lack
        except RecipeError as error:
            yield from error.problems


def _too_few(recipe: Recipe, needed: int) -> Iterator[Problem]:
    """What files alone do not say of an algorithm that has written down no facts."""
    if recipe.batch.samples < needed:
        reason = f"{recipe.batch.samples} is too few for {recipe.algorithm.name}, which compares {needed} or more"
        yield Problem(field="batch.samples", reason=reason, fix=f"use at least {needed}")
