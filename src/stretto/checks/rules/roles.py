"""The models beside the one that is trained: who needs them, and whether those that are named can serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stretto.algorithms.catalog import find_facts
from stretto.checks.rules.base import CheckContext
from stretto.errors import Problem, RecipeError
from stretto.models.source import facts, locate
from stretto.recipe.schema import Gae, Recipe, RoleModel

CLASSIFIERS = {
    "reward_model": ("ForSequenceClassification", "sequence classifier", "reward"),
    "critic": ("ForTokenClassification", "token classifier", "value"),
}
"""Key of `roles` -> how transformers' classes for such models end, what that is, and what its number is."""

UNSAID = 2
"""Labels of a classifier whose configuration does not say; transformers' default."""


def values_have_a_critic(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A critic is there where an algorithm reads its values, and only there."""
    known = find_facts(recipe.algorithm.name)
    needed, critic = known is not None and "values" in known.needs, recipe.roles.critic
    if needed and critic is None:
        reason = f"is null, but algorithm.name is {recipe.algorithm.name}, which needs a critic"
        one = "{} for one like the model that is trained" if scene.planning else "{name: scratch} to try it out"
        yield Problem(field="roles.critic", reason=reason, fix=f"name one, or write {one}")
    if critic is not None and known is not None and not needed:
        reason = f"has no effect, because algorithm.name is {known.name}, which has no critic"
        yield Problem(field="roles.critic", reason=reason, fix="leave it out, or use ppo")


def value_clip_is_used(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What limits the critic's update has no effect while there is none."""
    given = getattr(recipe.algorithm, "gae", None)
    if given is not None and recipe.roles.critic and given.value_clip != Gae().value_clip and not scene.planning:
        reason = "has no effect: training the critic is not available yet"
        yield Problem(field="algorithm.gae.value_clip", reason=reason, fix="leave it out")


def reward_model_is_read(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A reward model and the part of the reward that is its score belong together."""
    if scene.planning:
        return
    parts = [f"rewards.{index}" for index, part in enumerate(recipe.rewards) if part.kind == "model"]
    if recipe.roles.reward_model is None:
        for part in parts:
            reason = "is the score of a reward model, and roles.reward_model is null"
            yield Problem(field=f"{part}.kind", reason=reason, fix="name one in roles.reward_model")
    elif not parts:
        reason = "has no effect, because no reward is of kind model"
        yield Problem(field="roles.reward_model", reason=reason, fix="add a reward of kind model, or leave it out")
    for part in parts[1:]:
        reason = f"{parts[0]} is the score of the reward model already"
        yield Problem(field=f"{part}.kind", reason=reason, fix="keep one of them, and give that the weight")


def classifiers_can_be_found(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Reward model and critic are there, and are classifiers of one label."""
    for key in CLASSIFIERS:
        section: RoleModel | None = getattr(recipe.roles, key)
        if section is not None and section.shape is None and not scene.planning:
            yield from classifier_problems(section.name, key, scene.root)


def classifier_problems(name: str | None, key: str, root: Path) -> Iterator[Problem]:
    """What the files of a model say against it as `roles.key`."""
    field, (ending, what, number) = f"roles.{key}.name", CLASSIFIERS[key]
    fix = f"name a hub id or a folder of a {what} with one label, or scratch to try a plan out"
    if name is None:
        yield Problem(field=field, reason="is null, so there is nothing to load", fix=fix)
        return
    try:
        files = locate(name, root)
        found = facts(files)
    except RecipeError as error:
        yield from (replace(problem, field=field, fix=fix) for problem in error.problems)
        return
    if files.gguf is not None:
        yield Problem(field=field, reason="a GGUF file holds no classifier", fix=fix)
    elif found is not None and not any(architecture.endswith(ending) for architecture in found.architectures):
        told = ", ".join(found.architectures) or found.family
        yield Problem(field=field, reason=f"{name} is a {told}, which is no {what}", fix=fix)
    elif found is not None and (labels := found.labels or UNSAID) != 1:
        yield Problem(field=field, reason=f"{name} has {labels} labels, and a {number} is one number", fix=fix)


def accuracy_has_a_verdict(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What a reward model or a length gives has no full marks."""
    if recipe.evaluate.every > 0 and recipe.rewards and not any(part.judges for part in recipe.rewards):
        reason = "asks for an accuracy, and a reward model's score or a length says of no answer that it is right"
        fix = "use 0, or add a reward that knows right from wrong"
        yield Problem(field="evaluate.every", reason=reason, fix=fix)
