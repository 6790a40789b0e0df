"""The KL from the reference: what it is measured against, and a coefficient or an estimator that would not pull."""

from __future__ import annotations

from collections.abc import Iterator

from stretto.algorithms.catalog import ADAPTS, PULLING, find_facts
from stretto.checks.rules.base import CheckContext
from stretto.errors import Problem
from stretto.recipe.schema import Recipe


def kl_has_a_reference(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """KL is measured against something, and so is V*."""
    if recipe.roles.reference is not None:
        return
    facts, coef = find_facts(recipe.algorithm.name), recipe.algorithm.kl.coef
    if facts and facts.taught:  # a teacher is asked instead
        return
    if coef > 0:
        reason, fix = f"is null, but algorithm.kl.coef is {coef:g}", "use adapter-off, or set algorithm.kl.coef to 0"
        yield Problem(field="roles.reference", reason=reason, fix=fix)
    elif facts and facts.needs & {"reference", "vstar"}:
        reason = f"is null, but algorithm.name is {facts.name}, which needs a reference"
        yield Problem(field="roles.reference", reason=reason, fix="use adapter-off, or another algorithm")


def kl_in_the_reward_pulls(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """In the reward only k1 has the gradient of the KL in expectation; a run with another drifts or collapses."""
    kl = recipe.algorithm.kl
    if kl.coef > 0 and kl.where == "reward" and kl.estimator in ("k2", "k3"):
        why = {
            "k2": "it punishes tokens that have become too rare like those that have become too likely",
            "k3": "its expected gradient is that of the KL less that of the KL the other way round",
        }
        reason = f"{kl.estimator} in the reward does not pull towards the reference: {why[kl.estimator]}"
        fix = f"leave it out (auto is {PULLING['reward']} there), or use algorithm.kl.where: loss"
        yield Problem(field="algorithm.kl.estimator", reason=reason, fix=fix)


def kl_can_adapt(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A coefficient that moves is one of a KL that is there, and of credit: a loss is made before the run."""
    kl = recipe.algorithm.kl
    if kl.adaptive is None:
        return
    if kl.coef == 0:
        reason = "has no effect while algorithm.kl.coef, where it begins, is 0"
        yield Problem(
            field="algorithm.kl.adaptive", reason=reason, fix="set algorithm.kl.coef above 0, or leave it out"
        )
    elif kl.where == "loss":
        reason = "a coefficient that adapts is not available yet for a KL in the loss"
        yield Problem(field="algorithm.kl.adaptive", reason=reason, fix="use algorithm.kl.where: reward")
    elif kl.adaptive.horizon <= ADAPTS * (made := recipe.batch.prompts * recipe.batch.samples):
        reason = f"with {kl.adaptive.horizon}, one step of {made} trajectories (batch.prompts x batch.samples) could "
        reason += "take the coefficient to 0 or below, where it pushes away from the reference"
        fix = f"use several times {made}; 10000 is usual"
        yield Problem(field="algorithm.kl.adaptive.horizon", reason=reason, fix=fix)
