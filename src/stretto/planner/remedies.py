"""What of a recipe could change so that its step fits the devices that there are, where nothing fits.

The least change comes first. Nothing is simulated: a plan that has room, and that can be executed, is enough.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.enumerate import Candidates, Variant
from stretto.planner.problem import PlanningProblem
from stretto.planner.workload import workload_of
from stretto.recipe.schema import Adapter, Recipe


def remedy(recipe: Recipe, root: Path, setting: PlanningProblem, variants: tuple[Variant, ...]) -> str | None:
    """The least change with which something fits, as on a command line; none if no change that is known here does."""
    for told, changed in changes(recipe):
        there = PlanningProblem.of(workload_of(changed, root), setting.cluster)
        if holds(there, variants):
            return told
    return None


def changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """(change, the recipe with it): first what takes back a limit of the user's own, then what stores less."""
    if recipe.batch.token_budget != "auto":
        yield "batch.token_budget=auto", with_values(recipe, "batch", token_budget="auto")
    if recipe.optimizer.checkpointing is False:
        yield "optimizer.checkpointing=auto", with_values(recipe, "optimizer", checkpointing="auto")
    kept = recipe.model.quantize
    narrow: tuple[str, ...] = ("nf4",)
    if recipe.model.adapter is None:
        smaller = {"adamw": ("adamw16bit", "adamw8bit"), "adamw16bit": ("adamw8bit",)}
        for name in smaller.get(recipe.optimizer.name, ()) if recipe.model.dtype != "float64" else ():
            yield f"optimizer.name={name}", with_values(recipe, "optimizer", name=name)
        recipe, adapted = with_values(recipe, "model", adapter=Adapter()), f"model.adapter.rank={Adapter().rank} "
        yield adapted.strip(), recipe
    else:
        adapted, narrow = "", ("int8", "nf4") if kept == "none" else ("nf4",)
    for bits in narrow if kept != "nf4" else ():
        yield f"{adapted}model.quantize={bits}", with_values(recipe, "model", quantize=bits)


def with_values(recipe: Recipe, section: str, **values: Any) -> Recipe:
    """The recipe with other values in one of its sections."""
    changed = getattr(recipe, section).model_copy(update=values)
    return recipe.model_copy(update={section: changed})


def holds(setting: PlanningProblem, variants: tuple[Variant, ...]) -> bool:
    """True if a plan over all devices has room and can be executed, without a look at its seconds."""
    work, grid = setting.workload, Candidates(setting, StageTimes(setting), MemoryFits(setting))
    return any(
        fitting.runs(work)
        for each in variants
        if each.cannot(setting) is None
        for choice in grid.choices(each, len(setting.names))
        if choice.runs(work)
        for fitting, _ in grid.fitting(choice, each)
    )
