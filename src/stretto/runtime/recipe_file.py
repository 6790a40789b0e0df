"""RUN/recipe.yaml: every key as the run uses it, and on the first lines the folder that relative paths count from."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

from stretto.algorithms.own_facts import announce
from stretto.errors import RecipeError
from stretto.models.source import width_of
from stretto.plugins import folders_of
from stretto.recipe.load import Changes, load_recipe, read_text
from stretto.recipe.resolve import ASSUMED_WIDTH, dump, resolve
from stretto.recipe.schema import Recipe
from stretto.runtime.moved import root_in, root_lines

MAY_BE_PATHS = (
    "model.name", "roles.reference.name", "roles.critic.name", "roles.teacher.name", "roles.reward_model.name",
    "task.source.path", "task.chat_template", "batch.lengths.from_run", "engine.python",
)  # fmt: skip
"""Keys whose files are looked for beside the recipe, and then in the working directory."""


def load_run_recipe(folder: Path, changes: Changes = ()) -> tuple[Recipe, Path]:
    """A run's recipe, and the folder that its relative paths count from; its first lines remember that."""
    path = folder / "recipe.yaml"
    if not path.is_file():
        begins = folder.is_file() and folder.suffix in (".yaml", ".yml") and not (folder.parent / "plan.json").exists()
        train = f"; {shlex.join(['stretto', 'train', str(folder)])} begins a run of a recipe" if begins else ""
        fix = f"name a folder that train made{train}"
        raise RecipeError.of(str(folder), "is not a run: it holds no recipe.yaml", fix)
    root, recipe = root_in(read_text(path), folder), load_recipe(path, changes)
    announce(recipe.algorithm.name, folders_of(root))
    return resolve(recipe, partial(width_of, root=root)), root


def with_rates(recipe: Recipe, root: Path, note: Callable[[str], None]) -> Recipe:
    """Return the recipe with the numbers of learning rates that are `auto`, whatever the model's files say."""
    recipe, critic = resolve(recipe, partial(width_of, root=root)), recipe.roles.critic
    if "auto" not in (recipe.optimizer.lr, critic and critic.optimizer and critic.optimizer.lr):
        return recipe
    recipe = resolve(recipe, lambda section: width_of(section, root) or ASSUMED_WIDTH)
    note(f"optimizer.lr: {recipe.optimizer.lr:g}; a hidden size that is not known counts as {ASSUMED_WIDTH}")
    return recipe


def recipe_text(recipe: Recipe, root: Path, folder: Path) -> str:
    """A run's recipe.yaml, which remembers what its relative paths count from."""
    return f"{root_lines(root, folder)}{dump(recipe)}"


def with_lasting_paths(recipe: Recipe, root: Path) -> Recipe:
    """The recipe, in which a path that was found in the working directory is told from `root`: the run goes on, and is
    sampled, from any other directory too."""
    data = recipe.model_dump()
    for key in MAY_BE_PATHS:
        if isinstance(path := _value(data, key), str) and _only_here(os.path.expanduser(path), root):
            recipe = _changed(recipe, key, _from(path, root))
    return recipe


def _changed(section: Any, key: str, value: str) -> Any:
    """The section with another value under a dotted key. What it leaves open stays open: a default is no wish."""
    name, _, below = key.partition(".")
    return section.model_copy(update={name: _changed(getattr(section, name), below, value) if below else value})


def _from(path: str, root: Path) -> str:
    """A path of the working directory as seen from `root`, whose own folders may be links to elsewhere."""
    folder, name = os.path.split(path)
    return os.path.relpath(os.path.join(os.path.realpath(folder or "."), name), os.path.realpath(root))


def _value(data: object, key: str) -> object:
    """What stands under a dotted key; none where a section above it is no section."""
    return reduce(lambda section, part: section.get(part) if isinstance(section, dict) else None, key.split("."), data)


def _only_here(path: str, root: Path) -> bool:
    """True for what the working directory has, and `root` has not."""
    return not (root / path).exists() and Path(path).exists()
