"""Files on this machine that a recipe reads, and whether they are where a job of a deployment can read them.

Containers and rented machines get the project's folder, without the patterns of `templates/dockerignore`. An input that
is left out so is copied beside the files that are written; one outside the project is refused. Slurm's hosts see the
disk that the project is on, so its jobs read files where they are.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from stretto.checks.rules.base import value_of
from stretto.deploy.deployment import Deployment, InputCopy
from stretto.errors import Problem, RecipeError
from stretto.models.source import locate
from stretto.plugins import folders_of, is_plugin, plugins_of
from stretto.recipe.schema import Recipe
from stretto.sandbox.imports import sources
from stretto.storage.manifest import STATE

MOVABLE = (
    "model.name", "roles.critic.name", "roles.teacher.name", "roles.reward_model.name",
    "task.source.path", "task.chat_template", "batch.lengths.from_run",
)  # fmt: skip
"""Keys whose files are looked for in the working directory, too, so that a copy can take their place."""

FIXED = ("environment.corpus", "algorithm.vstar.table", "placement.cluster")
"""Other keys that may name a file or folder."""


def inputs_of(recipe: Recipe, root: Path, made: Deployment) -> tuple[InputCopy, ...]:
    """The inputs to copy; RecipeError with every input that cannot reach the machines of a deployment."""
    copies, problems = dict[str, InputCopy](), list[Problem]()
    for key, path in _named(recipe, root):
        if not (lies := path.resolve()).is_relative_to(made.project):
            reason = f"{path} lies outside {made.project}, which is all that the machines get"
            fix = "copy it into the project and name the copy, or deploy to slurm, whose hosts read the same disk"
            problems.append(Problem(field=key, reason=reason, fix=fix))
        elif _left_out(lies.relative_to(made.project)):
            if key not in MOVABLE:
                reason = f"{path} is left out of the project's copy (Dockerfile.dockerignore)"
                problems.append(Problem(field=key, reason=reason, fix="move it to another folder of the project"))
                continue
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", lies.relative_to(made.project).as_posix()).lstrip(".-")
            # Of a run only samples are read, of a checkpoint only the model.
            run = key == "batch.lengths.from_run"
            path, name = (path / "samples", f"{name}/samples") if run else (path, name)
            copies[key] = InputCopy(key=key, path=path, name=name, without=(STATE,))
    if problems:
        raise RecipeError(*problems)
    return tuple(copies.values())


def _named(recipe: Recipe, root: Path) -> Iterator[tuple[str, Path]]:
    """Key and path of everything on this machine that the recipe reads."""
    for key in (*MOVABLE, *FIXED):
        value = value_of(recipe, key)
        if not isinstance(value, str) or value in ("scratch", "auto") or value.startswith("package:"):
            continue
        path = next((each for each in _places(value, root) if each.exists()), None)
        if path is None:
            continue
        yield key, path
        if key.endswith("name") and (adapter := locate(value, root).adapter) is not None:
            yield from ((f"{key} (the adapter's base)", each) for each in _places(adapter.base, root) if each.exists())
    folders = folders_of(root)
    named = [(key, name) for _, key, name in plugins_of(recipe)]
    named += [(f"rewards.{index}.kind", part.kind) for index, part in enumerate(recipe.rewards)]
    installed = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))
    for key, name in named:
        for file in sources(name, folders).values() if is_plugin(name) else ():
            if not any(file.resolve().is_relative_to(place) for place in installed):
                yield key, file


def _places(value: str, root: Path) -> tuple[Path, Path]:
    """Return the places of a path: next to the recipe, then in the working directory."""
    path = Path(value).expanduser()
    return root / path, Path.cwd() / path


def _left_out(path: Path) -> bool:
    """True for a path of the project that `templates/dockerignore` leaves out."""
    first, parts = path.parts[0], path.parts
    return (
        first in ("runs", ".stretto")
        or first.startswith(".venv")
        or not {".git", "__pycache__"}.isdisjoint(parts)
        or any(fnmatch(part, pattern) for part in parts for pattern in (".env*", "*.pem", "*.key"))
    )
