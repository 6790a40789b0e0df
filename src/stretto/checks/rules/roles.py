"""The models beside the one that is trained: who needs them, and whether those that are named can serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stretto.algorithms.catalog import find_facts
from stretto.checks.rules.base import CheckContext
from stretto.errors import Problem, RecipeError
from stretto.models.source import facts, locate
from stretto.recipe.schema import Critic, Gae, Recipe, RoleModel, Section

HEADLESS = "ForCausalLM"
"""How transformers' classes of models end that have no head of one number, which a critic gets where it is trained."""

CLASSIFIERS = {
    "reward_model": (("ForSequenceClassification",), "sequence classifier", "reward"),
    "critic": (("ForTokenClassification", "ForSequenceClassification"), "token or sequence classifier", "value"),
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


def critics_keys_are_used(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What says how a critic learns has no effect on one that does not."""
    critic, gae = recipe.roles.critic, getattr(recipe.algorithm, "gae", None)
    if critic is None or critic.optimizer is not None:
        return
    reason = "has no effect, because roles.critic.optimizer is null and so the critic is not trained"
    set_keys = [f"algorithm.gae.{key}" for key in ("value_clip", "critic_lam") if gae and _changed(gae, Gae(), key)]
    set_keys += [f"roles.critic.{key}" for key in ("adapter", "warmup_steps") if _changed(critic, Critic(), key)]
    for field in set_keys:
        yield Problem(field=field, reason=reason, fix="leave it out, or give the critic an optimizer")


def _changed(section: Section, usual: Section, key: str) -> bool:
    return bool(getattr(section, key) != getattr(usual, key))


def one_lambda_is_told(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The policy looks ahead by a number or by length."""
    gae = getattr(recipe.algorithm, "gae", None)
    if gae and gae.length_alpha is not None and gae.critic_lam is not None and _changed(gae, Gae(), "lam"):
        reason = "has no effect: length_alpha says lambda of the policy, and critic_lam that of the critic"
        yield Problem(field="algorithm.gae.lam", reason=reason, fix="leave it out, or one of the two")


def warmup_of_the_critic_ends(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The policy must get to learn."""
    critic, steps = recipe.roles.critic, recipe.run.steps
    if critic is not None and critic.warmup_steps >= steps:
        reason = f"{critic.warmup_steps} steps of a critic alone leave none of the run's {steps} (run.steps)"
        yield Problem(field="roles.critic.warmup_steps", reason=reason, fix=f"use less than {steps}")


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
            heads = key == "critic" and getattr(section, "optimizer", None) is not None
            yield from classifier_problems(section.name, key, scene.root, gets_a_head=heads)


def classifier_problems(name: str | None, key: str, root: Path, *, gets_a_head: bool = False) -> Iterator[Problem]:
    """What the files of a model say against it as `roles.key`; one without a head may get one."""
    field, (endings, what, number) = f"roles.{key}.name", CLASSIFIERS[key]
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
    if files.adapter is not None:
        yield adapter_problem(name, field, files.adapter.base)
    elif files.gguf is not None:
        yield Problem(field=field, reason="a GGUF file holds no classifier", fix=fix)
    elif gets_a_head and found is not None and any(name.endswith(HEADLESS) for name in found.architectures):
        return
    elif found is not None and not any(architecture.endswith(endings) for architecture in found.architectures):
        told = ", ".join(found.architectures) or found.family
        yield Problem(field=field, reason=f"{name} is a {told}, which is no {what}", fix=fix)
    elif found is not None and (labels := found.labels or UNSAID) != 1:
        yield Problem(field=field, reason=f"{name} has {labels} labels, and a {number} is one number", fix=fix)


def adapter_problem(name: str, field: str, base: str) -> Problem:
    """An adapter is named for a role that takes whole models."""
    reason = f"{name} is an adapter of {base}; adapters for this role are not available yet"
    fix = "name the folder that `stretto merge` makes of its run, or that PEFT's merge_and_unload saves"
    return Problem(field=field, reason=reason, fix=fix)


def accuracy_has_a_verdict(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What a reward model or a length gives has no full marks."""
    if recipe.evaluate.every > 0 and recipe.rewards and not any(part.judges for part in recipe.rewards):
        reason = "asks for an accuracy, and a reward model's score or a length says of no answer that it is right"
        fix = "use 0, or add a reward that knows right from wrong"
        yield Problem(field="evaluate.every", reason=reason, fix=fix)
