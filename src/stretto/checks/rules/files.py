"""Where a recipe reads from and writes to: the model's files and the run folder. No weights are read."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from stretto.algorithms.catalog import find_facts
from stretto.checks.rules.base import CheckContext
from stretto.errors import Problem, RecipeError
from stretto.models.source import facts, locate
from stretto.recipe.schema import Recipe


def plan_is_sound(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Every stage is served, by devices that the cluster has."""
    yield from scene.probes.plan(recipe, scene.root)


def model_can_be_found(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The model is there, says what it is, and can hold an answer."""
    try:
        found = facts(locate(recipe.model.name, scene.root))
    except RecipeError as error:
        yield from error.problems
        return
    longest = recipe.engine.max_new_tokens
    if found and found.context is not None and found.context <= longest:
        yield Problem(
            field="engine.max_new_tokens",
            reason=f"{longest} leaves no room for a prompt in the context of model.name, {found.context} tokens",
            fix=f"use less than {found.context}",
        )


def adapter_can_go_on(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """An adapter that is named as the model is the one that the recipe trains; what KL is measured against is there."""
    try:
        adapter = locate(recipe.model.name, scene.root).adapter
    except RecipeError:  # told by the rule above
        return
    if adapter is None:
        return
    if (problem := adapter.refused(recipe.model.adapter)) is not None:
        yield problem
    known = find_facts(recipe.algorithm.name)
    if recipe.algorithm.kl.coef > 0 or (known is not None and known.needs & {"reference", "vstar"}):
        yield Problem(
            field="model.name",
            reason="is an adapter, and with it switched off the reference would be its base and not the model as it "
            "was before training; measuring against it is not available yet",
            fix="name the model that `stretto merge` makes of it, or use an algorithm and a KL without a reference",
        )


def values_are_there(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The table of V* was made, if the algorithm reads one."""
    if scene.training and find_facts(recipe.algorithm.name) is not None:
        yield from scene.probes.table(recipe, scene.root)


def lengths_are_recorded(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The run that lengths are taken from is there."""
    run = recipe.batch.lengths.from_run if recipe.batch.lengths and scene.training else None
    if run is not None and not any(os.path.isdir(place / run / "samples") for place in (scene.root, Path.cwd())):
        reason = f"{run} is no folder of a run with samples"
        yield Problem(field="batch.lengths.from_run", reason=reason, fix="name a run, such as runs/tiny-001")


def run_folder_is_free(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A run never writes into what is already there."""
    given = recipe.run.folder
    if not scene.training:
        return
    folder = Path.cwd() / ("runs" if given == "auto" else given)
    if given.startswith("~"):
        yield Problem(field="run.folder", reason="~ is not read here", fix=f"write {os.path.expanduser(given)}")
        return
    if given != "auto" and os.path.lexists(folder):
        yield Problem(
            field="run.folder",
            reason=f"{folder} exists already",
            fix="name another folder, use auto, or go on with the run there: stretto resume",
        )
        return
    if why := unwritable(folder):
        yield Problem(field="run.folder", reason=why, fix="name a folder that you may write to")


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written to a folder that may not exist yet, or none. Tries with a file that has no name."""
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except (OSError, ValueError) as error:
        return f"{place} cannot be written to: {getattr(error, 'strerror', None) or error}"


def logs_can_be_written(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """TensorBoard's files are written by its own package."""
    if scene.training and "tensorboard" in recipe.log and importlib.util.find_spec("tensorboard") is None:
        fix = "pip install tensorboard, or use []"
        yield Problem(field="log", reason="the package tensorboard is not installed", fix=fix)
