"""`stretto deploy`: the files that start a recipe elsewhere, after the recipe was checked and planned for there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from stretto.algorithms.catalog import facts_of, learns_from_rows
from stretto.api.deploy_inputs import inputs_of
from stretto.api.recipes import PROBES
from stretto.checks.recipe import checked_recipe
from stretto.deploy.deployment import INPUTS, Deployment, deployment
from stretto.deploy.targets import NEEDS_SOURCE, NEXT, TARGETS
from stretto.deploy.write import write
from stretto.errors import RecipeError
from stretto.plugins import is_plugin
from stretto.recipe.load import folder_of
from stretto.recipe.resolve import vstar_of
from stretto.recipe.schema import Placement, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """What was written."""

    folder: Path
    """Where the files are."""
    files: tuple[Path, ...]
    """The files and folders in it."""
    step_seconds: float | None
    """What the planner expects of a step there, in seconds; `None` where there is no plan."""
    strategy: str | None
    """The plan's strategy; `None` for `sft` and `reward_model`, which sample nothing and are not planned yet."""
    notes: tuple[str, ...]
    """Sentences about the inputs and the commands of the job."""
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

    The recipe must pass the checks of `stretto check` with that cluster, and fit it by the planner's count. A table of
    V* is made there. Models in runs/ are copied for targets that get a copy of the project.
    """
    if target not in TARGETS:
        raise RecipeError.of("TARGET", f"{target!r} is none of them", f"use {', '.join(TARGETS)}")
    made = deployment(recipe, changes, cluster=cluster, to=to, target=target, hours=hours, image=image)
    TARGETS[target](made)  # what it refuses comes first
    root = folder_of(recipe)
    # A folder here is none there, and a table of V* is made there.
    asked = replace(PROBES, table=lambda recipe, root: ())
    opened = checked_recipe(recipe, [*made.changes, "run.folder=auto"], root=root, probes=asked)
    if target in NEEDS_SOURCE and opened.engine.kind == "vllm":
        fix = "use engine.kind: native, or slurm with an environment of yours that has vLLM"
        raise RecipeError.of("engine.kind", f"what {target} installs has no vLLM", fix)
    made = replace(
        made,
        extras=extras_of(opened),
        packages=packages_of(opened.model.name),
        verb=VERBS.get(opened.algorithm.name, "train"),
        makes_table=makes_table(opened),
        inputs=inputs_of(opened, root, made) if target in NEEDS_SOURCE else (),
    )
    planned = not learns_from_rows(opened.algorithm.name)
    best = plan_there(recipe, opened.placement, cluster, changes) if planned else None
    paths = write(made, target, TARGETS[target](made), best)
    return Deployed(
        folder=made.folder,
        files=tuple(paths),
        step_seconds=best["seconds"]["step"] if best else None,
        strategy=best["strategy"] if best else None,
        notes=tuple(_notes(made)),
        next=NEXT[target].format(folder=made.inside, image=made.image),
    )


VERBS = {"sft": "sft", "reward_model": "reward-model"}
"""Algorithms that have a command of their own."""


def makes_table(recipe: Recipe) -> bool:
    """True if the run reads a table of V* that no key names, so that `stretto value` makes it there."""
    return "vstar" in facts_of(recipe.algorithm.name).needs and vstar_of(recipe).table == "auto"


def _notes(made: Deployment) -> Iterator[str]:
    for each in made.inputs:
        shown = each.path.relative_to(made.project) if each.path.is_relative_to(made.project) else each.path
        yield f"{each.key}: {shown} is copied to {made.inside}/{INPUTS}/{each.name}, as it is now"
    if made.makes_table:
        yield f"train.sh makes the table of V* first ({made.run}.vstar.jsonl), with stretto value"
    if made.verb != "train":
        yield f"train.sh calls stretto {made.verb}; a recipe that begins with its model reads it from {made.run}"


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
