"""`stretto deploy`: the files that start a recipe elsewhere, after the recipe was checked and planned for there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from stretto.api.recipes import open_recipe
from stretto.deploy.deployment import deployment
from stretto.deploy.targets import NEEDS_SOURCE, NEXT, TARGETS
from stretto.deploy.write import write
from stretto.errors import RecipeError
from stretto.plugins import is_plugin
from stretto.recipe.schema import Placement, Recipe


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
    hours: int | None = None,
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
    if target in NEEDS_SOURCE and opened.engine.kind == "vllm":
        fix = "use engine.kind: native, or slurm with an environment of yours that has vLLM"
        raise RecipeError.of("engine.kind", f"what {target} installs has no vLLM", fix)
    extras, packages = extras_of(opened), packages_of(opened.model.name)
    files = TARGETS[target](replace(made, extras=extras, packages=packages))
    best = plan_there(recipe, opened.placement, cluster, changes)
    paths = write(made, target, files, best)
    return Deployed(
        folder=made.folder,
        files=tuple(paths),
        step_seconds=best["seconds"]["step"],
        strategy=best["strategy"],
        next=NEXT[target].format(folder=made.inside, image=made.image),
    )


def plan_there(recipe: Path, placement: Placement, cluster: str, changes: Sequence[str]) -> dict[str, Any]:
    """The plan of the recipe's strategy, or of its cells, on a cluster; a RecipeError if that cannot be executed."""
    from stretto.api.planning import planned

    by_hand = None if placement.cells is None else {"strategy": placement.strategy, "cells": list(placement.cells)}
    named = None if placement.strategy == "auto" or by_hand else placement.strategy
    without = [] if by_hand is None else ["placement.cells=null"]
    found = planned(
        recipe, cluster=cluster, strategy=named, changes=[*changes, *without], measure=False, cells=by_hand,
        baselines=False, note=lambda text: None,
    )  # fmt: skip
    plans: list[dict[str, Any]] = found.document()["plans"]
    meant = [plan for plan in plans if by_hand is None or plan["strategy"].startswith("yours")]
    ready = [plan for plan in meant if plan["runs_today"]]
    if not ready:
        waits = ", ".join(dict.fromkeys(each for plan in meant for each in plan["waits_for"]))
        fix = "use another cluster or strategy; `stretto plan` shows what each comes to"
        raise RecipeError.of("--cluster", f"no plan for {cluster} can be executed yet: {waits}", fix)
    return ready[0]


def extras_of(recipe: Recipe) -> tuple[str, ...]:
    """The extras of this project that a recipe needs where it runs."""
    environment, source = recipe.environment.kind, recipe.task.source.kind
    asks_for_address = environment == "program" or is_plugin(environment)  # a function of the user's may
    needed = {
        "quant": recipe.model.quantize == "nf4",
        "arc": source == "arc",
        "environments": source == "verifiers",
        "serve": source == "verifiers" or asks_for_address,
        "tools": environment == "tools",
        **{name: name in recipe.log for name in ("wandb", "trackio", "mlflow")},
    }
    return ("ray", "tasks", *(extra for extra, true in needed.items() if true))


def packages_of(model: str) -> tuple[str, ...]:
    """The package, with its version, that carries a model called package:NAME/FILE."""
    if not model.startswith("package:"):
        return ()
    found = packages_distributions().get(model.removeprefix("package:").partition("/")[0], [])
    return tuple(f"{name}=={version(name)}" for name in found[:1])
