"""What a recipe that distils must have, and what has no effect in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stretto.algorithms.catalog import find_facts
from stretto.checks.rules.base import CheckContext, is_default
from stretto.checks.rules.roles import adapter_problem
from stretto.errors import Problem, RecipeError
from stretto.models.source import facts, locate
from stretto.recipe.resolve import taught_alone
from stretto.recipe.schema import Distill, Recipe, SingleTurnSection
from stretto.tasks.template import columns_of, problems

HEADED = "ForCausalLM"
"""How transformers' classes of language models end."""

JUDGING = ("evaluate.pass_k", "deadlines.reward", "guards.reward_collapse")
"""Keys about verdicts."""

NAME_ONE = "name a hub id or a folder of a language model with the same tokenizer"


def distillation_has_a_teacher(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A teacher is there where an algorithm asks one, and only there."""
    known, teacher = find_facts(recipe.algorithm.name), recipe.roles.teacher
    if known is None:
        return
    if known.taught and teacher is None:
        reason = f"is null, but algorithm.name is {known.name}, which learns from a teacher"
        yield Problem(field="roles.teacher", reason=reason, fix=NAME_ONE)
    if teacher is not None and not known.taught:
        reason = f"has no effect, because algorithm.name is {known.name}, which asks no teacher"
        yield Problem(field="roles.teacher", reason=reason, fix="leave it out, or use distill")
    if known.taught and recipe.algorithm.kl.coef > 0:
        reason = f"has no effect: {known.name} pulls towards the teacher, and nothing else is asked"
        yield Problem(field="algorithm.kl.coef", reason=reason, fix="leave it out")


def teacher_can_be_found(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """It is there, and is a language model."""
    teacher, field = recipe.roles.teacher, "roles.teacher.name"
    if teacher is None or scene.planning or teacher.shape is not None:
        return
    if teacher.name is None or (teacher.name == "scratch" and teacher.prompt is None):
        reason = "is the policy before training, which has nothing to teach" if teacher.name else "is null"
        other = ", or give it roles.teacher.prompt, which says more than the policy is told" if teacher.name else ""
        yield Problem(field=field, reason=reason, fix=f"{NAME_ONE}{other}")
        return
    if teacher.name == "scratch":
        return
    try:
        files = locate(teacher.name, scene.root)
        found = facts(files)
    except RecipeError as error:
        yield from (replace(problem, field=field, fix=NAME_ONE) for problem in error.problems)
        return
    if files.adapter is not None:
        yield adapter_problem(teacher.name, field, files.adapter.base)
        return
    if found is not None and found.architectures and not any(a.endswith(HEADED) for a in found.architectures):
        told = ", ".join(found.architectures)
        yield Problem(field=field, reason=f"{teacher.name} is a {told}, which is no language model", fix=NAME_ONE)


def teachers_prompt_can_be_filled(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Its names are columns of the task, and the answer stands right behind the prompt."""
    teacher, field = recipe.roles.teacher, "roles.teacher.prompt"
    if teacher is None or teacher.prompt is None:
        return
    if not isinstance(recipe.environment, SingleTurnSection):
        reason = f"is for conversations that a prompt opens, and environment.kind is {recipe.environment.kind}"
        yield Problem(field=field, reason=reason, fix="leave it out, or use single_turn")
    for prompt in scene.prompts:
        found = [replace(problem, field=field) for problem in problems(teacher.prompt, columns_of(prompt))]
        if found:
            yield from found
            return


def nobody_is_asked_for_verdicts(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A teacher says of no answer that it is right."""
    if recipe.rewards or not taught_alone(recipe):
        return
    if recipe.evaluate.every > 0:
        reason = "asks for an accuracy, and without rewards nobody says of an answer that it is right"
        fix = "leave it out, or add a reward that knows right from wrong"
        yield Problem(field="evaluate.every", reason=reason, fix=fix)
    for key in JUDGING:
        if not is_default(recipe, key):
            reason = "has no effect: there are no rewards, and a teacher judges no answer"
            yield Problem(field=key, reason=reason, fix="leave it out, or add rewards")


def exact_distillation_sees_everything(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Over part of a vocabulary the two distributions would not be over the same tokens."""
    section, engine = recipe.algorithm, recipe.engine
    if not isinstance(section, Distill):
        return
    if section.top_k is not None and (engine.top_p < 1 or getattr(engine, "top_k", None) is not None):
        reason = "is over the whole vocabulary, and engine.top_p or engine.top_k samples from a part of it"
        yield Problem(field="algorithm.top_k", reason=reason, fix="leave engine.top_p and engine.top_k out")
    if section.reward_weight > 0 and recipe.batch.samples < 2:
        reason = "1 is too few where algorithm.reward_weight compares the samples of a group"
        yield Problem(field="batch.samples", reason=reason, fix="use at least 2")
