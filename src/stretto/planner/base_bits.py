"""In how many bits a frozen base is stored, where the recipe leaves that to the memory of its devices.

Fewer bits change what is trained: in 4 bits a small model is another model. So as many are kept as a step has room for.
As for remedies nothing is simulated: a plan that has room, and that can be executed, is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto.placement.cluster import Cluster
from stretto.planner.forecast import setting_of
from stretto.planner.remedies import holds, with_values
from stretto.planner.search import variants_of
from stretto.recipe.schema import Recipe


def choices(recipe: Recipe, *, nf4: bool = True) -> tuple[str, ...]:
    """Kinds of storage, most bits first; `nf4` is false where the package for it is not there. fp8 takes as much as
    int8 and is less exact."""
    if recipe.engine.kind != "native":  # vLLM reads the base as it is
        return ("none",)
    return ("none", "int8", "nf4") if nf4 else ("none", "int8")


def widest_base(recipe: Recipe, root: Path, cluster: Cluster, kinds: Sequence[str]) -> str | None:
    """The first of these kinds of storage with which a step has room on a cluster, by the recipe's strategy; none if
    there is none. A RecipeError where the step cannot be planned."""
    section = recipe.placement
    named = None if section.strategy == "auto" or len(cluster.devices) == 1 else section.strategy
    variants = variants_of(section, named)
    for kind in kinds:
        setting = setting_of(with_values(recipe, "model", quantize=kind), root, cluster)
        if holds(setting, variants):
            return kind
    return None
