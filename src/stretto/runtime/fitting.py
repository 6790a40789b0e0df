"""Prompts that are longer than the recipe wants (`task.drop_longer_than`): which, before anything is asked of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stretto.algorithms.catalog import learns_from_rows
from stretto.environments.render import Renderer
from stretto.environments.rows import row_tokens
from stretto.errors import RecipeError, RolloutError
from stretto.recipe.resolve import longest_prompt
from stretto.recipe.schema import Recipe
from stretto.tasks.examples import chats_of
from stretto.tasks.template import reworded
from stretto.types import Prompt


def fitting(recipe: Recipe, prompts: Sequence[Prompt], tokenizer: Any, context: int) -> tuple[Prompt, ...]:
    """Those that are not dropped, in the same order; `context` is the shortest of the models that read them."""
    longest = longest_prompt(recipe, context)
    if longest is None:
        return tuple(prompts)
    renderer = Renderer(tokenizer, stop=frozenset(), arguments=recipe.task.template)
    if learns_from_rows(recipe.algorithm.name):
        lengths = row_tokens(renderer, [chats_of(prompt) for prompt in prompts], most=longest)
    else:
        lengths = renderer.lengths([prompt.messages for prompt in prompts], context=longest)
    return _teachable(recipe, _within(longest, prompts, lengths), renderer, context)


def _within(most: int, prompts: Sequence[Prompt], lengths: Iterable[int | RolloutError]) -> tuple[Prompt, ...]:
    pairs = zip(prompts, lengths, strict=True)
    return tuple(prompt for prompt, n in pairs if not isinstance(n, RolloutError) and n <= most)


def _teachable(recipe: Recipe, prompts: tuple[Prompt, ...], renderer: Renderer, context: int) -> tuple[Prompt, ...]:
    """Those after which an answer fits where the teacher reads it, who may be told more than the policy."""
    teacher = recipe.roles.teacher
    if teacher is None or (template := teacher.prompt) is None:
        return prompts
    most = context - recipe.engine.max_new_tokens
    lengths = renderer.lengths([reworded(prompt, template) for prompt in prompts], context=most)
    return _within(most, prompts, lengths)


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
