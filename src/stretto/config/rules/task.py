"""Prompts and rewards, judged by the first prompts of the task and by what the rewards say about themselves."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.config.rules.base import Scene
from stretto.config.schema import Recipe
from stretto.errors import Problem

COMPARING = ("exact", "numeric", "regex")
"""Rewards that compare the answer with a reference answer."""


def rewards_make_sense(recipe: Recipe, scene: Scene) -> Iterator[Problem]:
    """Each part for itself, as the rewards' own room sees it."""
    yield from scene.probes.rewards(recipe.rewards, scene.root)


def rewards_have_weight(recipe: Recipe, scene: Scene) -> Iterator[Problem]:
    """Without weight there is nothing to learn from."""
    if not any(part.weight for part in recipe.rewards):
        reason = "every weight is 0, so nothing could be learned"
        yield Problem(field="rewards", reason=reason, fix="give at least one part a weight")


def answers_can_be_compared(recipe: Recipe, scene: Scene) -> Iterator[Problem]:
    """exact, numeric and regex need a reference answer, and numeric one that holds a number."""
    lacking = next((prompt for prompt in scene.prompts if prompt.reference is None), None)
    wordy = next((prompt for prompt in scene.prompts if not any(map(str.isdigit, prompt.reference or "0"))), None)
    for index, part in enumerate(recipe.rewards):
        numeric = part.kind == "numeric" or (part.kind == "regex" and part.compare == "numeric")
        if part.kind in COMPARING and lacking:
            yield Problem(
                field=f"rewards.{index}.kind",
                reason=f"{part.kind} compares with a reference answer, and the prompt {lacking.id!r} has none",
                fix="name its column in task.source.columns.answer, or use a reward of your own, module:name",
            )
        elif numeric and wordy:
            key, answer = "kind" if part.kind == "numeric" else "compare", str(wordy.reference)[:40]
            yield Problem(
                field=f"rewards.{index}.{key}",
                reason=f"the reference answer of the prompt {wordy.id!r}, {answer!r}, holds no number",
                fix="use exact, or a task.source whose answers are numbers",
            )


def characters_cover_the_task(recipe: Recipe, scene: Scene) -> Iterator[Problem]:
    """A character tokenizer has no way to write a character that it lacks."""
    if recipe.model.name != "scratch" or recipe.model.scratch is None:
        return
    texts = [str(message.get("content", "")) for prompt in scene.prompts for message in prompt.messages]
    texts += [prompt.reference or "" for prompt in scene.prompts] + [recipe.task.source.alphabet or ""]
    missing = "".join(sorted(set().union(*texts) - set(recipe.model.scratch.characters)))
    if missing:
        yield Problem(
            field="model.scratch.characters",
            reason=f"does not have {missing!r}, which prompts or answers of task.source use",
            fix="add them to the characters, or change task.prompt so that it does without",
        )


def some_prompts_are_left(recipe: Recipe, scene: Scene) -> Iterator[Problem]:
    """Held-out prompts are never trained on, so they cannot be all there are."""
    held, there = recipe.task.holdout.prompts, len(scene.prompts)
    if scene.prompts and scene.complete and held >= there:
        yield Problem(
            field="task.holdout.prompts",
            reason=f"{held} are held out of the {there} that task.source has, which leaves none to train on",
            fix=f"use at most {there - 1}, or more data",
        )
