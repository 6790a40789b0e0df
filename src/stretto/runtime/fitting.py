"""Prompts that are longer than the recipe wants (`task.drop_longer_than`): which, before anything is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.algorithms.catalog import learns_from_rows
from stretto.environments.render import Renderer
from stretto.environments.rows import row_tokens
from stretto.errors import RecipeError, RolloutError
from stretto.recipe.resolve import longest_prompt
from stretto.recipe.schema import Recipe
from stretto.tasks.examples import chats_of
from stretto.types import Prompt


def fitting(recipe: Recipe, prompts: Sequence[Prompt], tokenizer: Any, context: int) -> tuple[Prompt, ...]:
    """Those that are not dropped, in the same order."""
    longest = longest_prompt(recipe, context)
    if longest is None:
        return tuple(prompts)
    renderer = Renderer(tokenizer, stop=frozenset(), arguments=recipe.task.template)
    if learns_from_rows(recipe.algorithm.name):
        lengths = row_tokens(renderer, [chats_of(prompt) for prompt in prompts], most=longest)
    else:
        lengths = renderer.lengths([prompt.messages for prompt in prompts])
    pairs = zip(prompts, lengths, strict=True)
    return tuple(prompt for prompt, n in pairs if not isinstance(n, RolloutError) and n <= longest)


def refuse_none(recipe: Recipe, kept: Sequence[Prompt]) -> None:
    """RecipeError where nothing is left to train on."""
    if not kept:
        reason = f"{recipe.task.drop_longer_than} drops every prompt to train on"
        raise RecipeError.of("task.drop_longer_than", reason, "use a larger number, or shorter prompts")


def refuse_nothing_held_out(recipe: Recipe, kept: Sequence[Prompt]) -> None:
    """RecipeError where nothing is left to evaluate on, because an accuracy of no prompts would look like any other."""
    if not kept:
        reason = f"{recipe.task.drop_longer_than} drops every prompt that is held out, so there is nothing to evaluate"
        fix = "use a larger number, hold more prompts out, or set evaluate.every to 0"
        raise RecipeError.of("task.drop_longer_than", reason, fix)
