"""Prompts and rewards, judged by the first prompts of the task and by what the rewards say about themselves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from stretto.checks.rules.base import CheckContext
from stretto.errors import Problem, RecipeError
from stretto.models.template_file import template_path
from stretto.recipe.resolve import taught_alone
from stretto.recipe.schema import CodeReward, LengthReward, Recipe, RegexReward
from stretto.rewards.length import budget
from stretto.types import Prompt


def rewards_make_sense(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Each part for itself, as the rewards' own room sees it."""
    yield from scene.probes.rewards(recipe.rewards, scene.root)


def rewards_have_weight(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Without weight there is nothing to learn from, unless a teacher says all that is learned."""
    if recipe.rewards and not any(part.weight for part in recipe.rewards) and not taught_alone(recipe):
        weight = getattr(recipe.algorithm, "reward_weight", 0.0)
        told = "algorithm.reward_weight adds nothing" if weight else "nothing could be learned"
        reason = f"every weight is 0, so {told}"
        yield Problem(field="rewards", reason=reason, fix="give at least one part a weight")


NEEDED = {"reasoning_gym": "scorer of reasoning-gym", "arc": "grids"}
"""Kinds of rewards that judge by what only prompts of the source of that name carry -> what that is."""


def scorers_have_their_task(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Some rewards judge by what only prompts of one source carry."""
    kind = recipe.task.source.kind
    for index, part in enumerate(recipe.rewards):
        if part.kind in NEEDED and kind != part.kind:
            yield Problem(
                field=f"rewards.{index}.kind",
                reason=f"prompts of a source of kind {kind} have no {NEEDED[part.kind]}",
                fix=f"use kind: {part.kind} for task.source.kind too, or another reward",
            )


def programs_can_be_tested(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The same as below, of the first prompts."""
    yield from untestable(recipe, scene.prompts, scene.probes.tests)


def untestable(
    recipe: Recipe, prompts: Sequence[Prompt], tests: Callable[[Prompt, str], str | None]
) -> Iterator[Problem]:
    """A reward for programs needs tests in each of these prompts."""
    for index, part in enumerate(recipe.rewards):
        if isinstance(part, CodeReward):
            found = ((prompt, tests(prompt, part.tests)) for prompt in prompts)
            if wrong := next(((prompt, reason) for prompt, reason in found if reason), None):
                yield Problem(
                    field=f"rewards.{index}.tests",
                    reason=f"{wrong[1]}, in the prompt {_named(wrong[0])}",
                    fix='name the column of the tests, and write them as [{"input": "1 2", "output": "3"}] or '
                    '[{"call": "f", "args": [1, 2], "expected": 3}]',
                )


def budgets_are_told(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The same as below, of the first prompts."""
    yield from budgets(recipe, scene.prompts)


def budgets(recipe: Recipe, prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """A length reward whose target is a column needs a number there in each of these prompts."""
    for index, part in enumerate(recipe.rewards):
        target = getattr(part, "target", None)
        if not isinstance(part, LengthReward) or not isinstance(target, str):
            continue
        if lacking := next((prompt for prompt in prompts if budget(prompt, target) is None), None):
            reason = f"the prompt {_named(lacking)} has no number of tokens in a column {target!r}"
            fix = f"use a number, or name the column; there are: {', '.join(sorted(lacking.tags)) or 'none'}"
            yield Problem(field=f"rewards.{index}.target", reason=reason, fix=fix)


def answers_can_be_compared(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The same as below, of the first prompts."""
    yield from comparisons(recipe, scene.prompts, scene.probes.numbers)


def comparisons(
    recipe: Recipe, prompts: Sequence[Prompt], numbers: Callable[[str], Iterable[str]]
) -> Iterator[Problem]:
    """Rewards that compare need a reference answer, and numeric one that is one number, in each of these prompts."""
    lacking = next((prompt for prompt in prompts if prompt.reference is None), None)
    counts = ((prompt, len(list(numbers("0" if prompt.reference is None else prompt.reference)))) for prompt in prompts)
    wordy, count = next(((prompt, count) for prompt, count in counts if count != 1), (None, 1))
    for index, part in enumerate(recipe.rewards):
        numeric = part.kind == "numeric" or (isinstance(part, RegexReward) and part.compare == "numeric")
        if part.compares and lacking:
            yield Problem(
                field=f"rewards.{index}.kind",
                reason=f"{part.kind} compares with a reference answer, and the prompt {_named(lacking)} has none",
                fix="add the answer, name its column in task.source.columns.answer, or use a reward of your own, "
                "module:name",
            )
        elif numeric and wordy:
            key, answer = "kind" if part.kind == "numeric" else "compare", str(wordy.reference)[:40]
            yield Problem(
                field=f"rewards.{index}.{key}",
                reason=f"the reference answer of the prompt {_named(wordy)}, {answer!r}, holds {count or 'no'} "
                f"number{'s' if count else ''}",
                fix="use exact, or a task.source whose answers are numbers",
            )


def _named(prompt: Prompt) -> str:
    """The prompt's id, which may be a mere hash, and how its last message begins."""
    text = str(prompt.messages[-1].get("content", ""))
    shown = text if len(text) <= 40 else f"{text[:40]}…"
    return f"{prompt.id!r} ({shown!r})"


def template_is_used(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A scratch model has a chat template of its own, which its warm-up has taught it. A file must be there."""
    if recipe.model.name == "scratch":
        for key in (key for key in ("template", "chat_template") if getattr(recipe.task, key)):
            reason = "has no effect on a scratch model, whose chats are written in one way only"
            yield Problem(field=f"task.{key}", reason=reason, fix="remove it")
        return
    if reserved := sorted({"messages", "add_generation_prompt", "tools", "documents"} & recipe.task.template.keys()):
        reason = "is told to the chat template by whoever renders a chat"
        yield Problem(field=f"task.template.{reserved[0]}", reason=reason, fix="remove it")
    try:
        json.dumps(recipe.task.template)
    except (TypeError, ValueError):
        yield Problem(
            field="task.template", reason="holds what is no plain value", fix="use texts, numbers and booleans"
        )
    try:
        template_path(recipe.task, scene.root)
    except RecipeError as error:
        yield from error.problems


def characters_cover_the_task(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A character tokenizer has no way to write a character that it lacks."""
    if recipe.model.name != "scratch" or recipe.model.scratch is None:
        return
    texts = [str(message.get("content", "")) for prompt in scene.prompts for message in prompt.messages]
    texts += [prompt.reference or "" for prompt in scene.prompts] + [getattr(recipe.task.source, "alphabet", "")]
    missing = "".join(sorted(set().union(*texts) - set(recipe.model.scratch.characters)))
    if missing:
        yield Problem(
            field="model.scratch.characters",
            reason=f"does not have {missing!r}, which prompts or answers of task.source use",
            fix="add them to the characters, or change task.prompt so that it does without",
        )


def some_prompts_are_left(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Held-out prompts are never trained on, so they cannot be all there are."""
    there = len(scene.prompts)
    held = recipe.held_out(there)
    if scene.prompts and scene.complete and held >= there:
        yield Problem(
            field="task.holdout.prompts",
            reason=f"{held} are held out of the {there} that task.source has, which leaves none to train on",
            fix=f"use at most {there - 1}, or more data",
        )
