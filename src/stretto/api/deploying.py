"""`stretto deploy`: the files that start a recipe elsewhere, after the recipe was checked and planned for there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import packages_distributions, version
from pathlib import Path

from stretto.api.recipes import open_recipe
from stretto.deploy.deployment import deployment
from stretto.deploy.targets import NEXT, TARGETS
from stretto.deploy.write import write
from stretto.errors import RecipeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """What was written."""

    folder: Path
    """Where the files are."""
    files: tuple[Path, ...]
    """The files and folders in it."""
    step_seconds: float
    """What the planner expects of a step there, in seconds."""
    strategy: str
    """The plan's strategy."""
    next: str
    """What to type to start it."""


def deploy(
    target: str,
    recipe: Path,
    *,
    cluster: str,
    changes: Sequence[str] = (),
    to: Path | None = None,
    hours: int = 24,
    image: str | None = None,
) -> Deployed:
    """Writes the files for slurm, modal, kuberay, skypilot or docker; starts and sends nothing.

    The recipe must pass the checks of `stretto check` with that cluster, and fit it by the planner's count.
    """
    if target not in TARGETS:
        raise RecipeError.of("TARGET", f"{target!r} is none of them", f"use {', '.join(TARGETS)}")
    made = deployment(recipe, changes, cluster=cluster, to=to, target=target, hours=hours, image=image)
    TARGETS[target](made)  # what it refuses comes first
    opened = open_recipe(recipe, list(made.changes), deep=False)
    files = TARGETS[target](replace(made, packages=packages_of(opened.model.name)))
    from stretto.api.planning import planned

    found = planned(
        recipe, cluster=cluster, strategy=None, changes=list(changes), measure=False, cells=None, baselines=False,
        note=lambda text: None,
    )  # fmt: skip
    best = found.document()["plans"][0]
    paths = write(made, target, files, best)
    return Deployed(
        folder=made.folder,
        files=tuple(paths),
        step_seconds=best["seconds"]["step"],
        strategy=best["strategy"],
        next=NEXT[target].format(folder=made.inside, image=made.image),
    )


def packages_of(model: str) -> tuple[str, ...]:
    """The package, with its version, that carries a model called package:NAME/FILE."""
    if not model.startswith("package:"):
        return ()
    found = packages_distributions().get(model.removeprefix("package:").partition("/")[0], [])
    return tuple(f"{name}=={version(name)}" for name in found[:1])
