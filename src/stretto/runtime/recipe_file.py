"""RUN/recipe.yaml: every key as the run uses it, and on the first lines the folder that relative paths count from."""

from __future__ import annotations

from pathlib import Path

from stretto.algorithms.own_facts import announce
from stretto.errors import RecipeError
from stretto.plugins import folders_of
from stretto.recipe.load import Changes, load_recipe, read_text
from stretto.recipe.resolve import dump, resolve
from stretto.recipe.schema import Recipe
from stretto.runtime.moved import root_in, root_lines


def load_run_recipe(folder: Path, changes: Changes = ()) -> tuple[Recipe, Path]:
    """A run's recipe, and the folder that its relative paths count from; its first lines remember that."""
    path = folder / "recipe.yaml"
    if not path.is_file():
        raise RecipeError.of(str(folder), "is not a run: it holds no recipe.yaml", "name a folder that train made")
    root, recipe = root_in(read_text(path), folder), load_recipe(path, changes)
    announce(recipe.algorithm.name, folders_of(root))
    return resolve(recipe), root


def recipe_text(recipe: Recipe, root: Path, folder: Path) -> str:
    """A run's recipe.yaml, which remembers what its relative paths count from."""
    return f"{root_lines(root, folder)}{dump(recipe)}"
