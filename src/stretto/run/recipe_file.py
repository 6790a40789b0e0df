"""RUN/recipe.yaml: every key as the run uses it, and on the first line the folder that relative paths count from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from stretto.config.load import load_recipe, read_text
from stretto.config.resolve import dump, resolve
from stretto.config.schema import Recipe
from stretto.errors import RecipeError


def recipe_of(folder: Path, changes: Sequence[str] = ()) -> tuple[Recipe, Path]:
    """A run's recipe, and the folder that its relative paths count from; its first line remembers that."""
    path = folder / "recipe.yaml"
    if not path.is_file():
        raise RecipeError.of(str(folder), "is not a run: it holds no recipe.yaml", "name a folder that train made")
    return resolve(load_recipe(path, changes)), root_in(read_text(path))


def recipe_text(recipe: Recipe, root: Path) -> str:
    """A run's recipe.yaml, which remembers what its relative paths count from."""
    path = str(root.resolve())
    return f"# root: {path if path.isprintable() else json.dumps(path)}\n{dump(recipe)}"


def root_in(text: str) -> Path:
    """What the relative paths of a run's recipe.yaml count from. A path that YAML cannot hold is quoted."""
    first = text.partition("\n")[0]
    told = first.removeprefix("# root: ").strip("\r")
    if told == first:
        return Path.cwd()
    try:
        return Path(json.loads(told) if told.startswith('"') else told)
    except ValueError:
        return Path(told)
