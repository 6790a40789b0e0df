"""What vLLM cannot do of what a recipe may ask of an engine, told before it is started."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.checks.rules.base import CheckContext
from stretto.errors import Problem, RecipeError
from stretto.models.source import facts, locate
from stretto.recipe.schema import Recipe, VllmEngineSection

HIGHEST = 512
"""Highest rank of an adapter that vLLM has room for."""


def vllm_can_do_it(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Its number types, its adapters, and keys that are the native engine's business."""
    if not isinstance(recipe.engine, VllmEngineSection):
        return
    fix = "use engine.kind: native"
    if recipe.model.dtype == "float64":
        yield Problem(field="model.dtype", reason="vLLM does not compute in float64", fix=f"use bfloat16, or {fix}")
    if recipe.model.quantize != "none" and not scene.planning:
        reason = "a quantised base with vllm is not available yet"
        yield Problem(field="model.quantize", reason=reason, fix=f"use none, or {fix}")
    if not scene.planning and _is_mixture(recipe, scene):
        reason = "a mixture of experts with vllm is not available yet: it stores experts under other names"
        yield Problem(field="engine.kind", reason=reason, fix=fix)
    adapter = recipe.model.adapter
    if adapter is not None and adapter.rank > HIGHEST:
        reason = f"vLLM has no room for adapters of rank {adapter.rank}; {HIGHEST} is the highest"
        yield Problem(field="model.adapter.rank", reason=reason, fix=f"use {HIGHEST} or less, or {fix}")
    if recipe.engine.speculate != "auto":
        reason = "has no effect on vllm: drafts that change no answer are the native engine's"
        yield Problem(field="engine.speculate", reason=reason, fix="leave it out")


def _is_mixture(recipe: Recipe, scene: CheckContext) -> bool:
    try:
        found = facts(locate(recipe.model.name, scene.root))
    except RecipeError:  # told by another rule
        return False
    return found is not None and found.mixture
