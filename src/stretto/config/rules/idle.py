"""Keys that would change nothing where they stand: a recipe that sets one says something that is not true.

A key counts as set when its value differs from its default, so a recipe that was resolved and written down stays
legal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stretto.algorithms.catalog import CATALOG
from stretto.config.resolve import best_was_asked
from stretto.config.rules.base import Scene, is_default
from stretto.config.schema import Recipe
from stretto.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """A key that has no effect while another has a certain value."""

    field: str
    """Its dotted name."""
    when: Callable[[Recipe], bool]
    """True where it has none."""
    reason: str
    """Why."""
    fix: str
    """What to do."""


NO_KL = "has no effect while algorithm.kl.coef is 0"
NO_KL_FIX = "set algorithm.kl.coef above 0, or leave it out"


def _no_kl(recipe: Recipe) -> bool:
    return recipe.algorithm.kl.coef == 0


IDLE = (
    Idle(field="algorithm.kl.estimator", when=_no_kl, reason=NO_KL, fix=NO_KL_FIX),
    Idle(field="algorithm.kl.where", when=_no_kl, reason=NO_KL, fix=NO_KL_FIX),
    Idle(field="roles.reference", when=_no_kl, reason=NO_KL, fix=NO_KL_FIX),
    Idle(
        field="algorithm.correction.cap",
        when=lambda recipe: recipe.algorithm.correction.kind == "none",
        reason="has no effect while algorithm.correction.kind is none",
        fix="leave it out, or use kind: token",
    ),
    Idle(
        field="algorithm.constant",
        when=lambda recipe: recipe.algorithm.name in CATALOG and not CATALOG[recipe.algorithm.name].constant,
        reason="has no effect, because algorithm.name divides by counts alone",
        fix="leave it out, or use dr_grpo",
    ),
    Idle(
        field="batch.oversample",
        when=lambda recipe: recipe.algorithm.name in CATALOG and not CATALOG[recipe.algorithm.name].drops,
        reason="has no effect but to throw answers away, because algorithm.name drops no groups",
        fix="leave it out, or raise batch.prompts",
    ),
    Idle(
        field="model.scratch",
        when=lambda recipe: recipe.model.name != "scratch",
        reason="has no effect unless model.name is scratch",
        fix="leave it out, or use name: scratch",
    ),
    Idle(
        field="task.holdout.seed",
        when=lambda recipe: recipe.task.holdout.prompts == 0,
        reason="has no effect while task.holdout.prompts is 0",
        fix="leave it out, or hold some prompts out",
    ),
    Idle(
        field="batch.max_rounds",
        when=lambda recipe: recipe.algorithm.name in CATALOG and not CATALOG[recipe.algorithm.name].drops,
        reason="has no effect, because algorithm.name drops no groups and so never samples again",
        fix="leave it out",
    ),
)


def keys_have_an_effect(recipe: Recipe, scene: Scene) -> Iterator[Problem]:
    """Every row of the table."""
    for row in IDLE:
        if not is_default(recipe, row.field) and row.when(recipe):
            yield Problem(field=row.field, reason=row.reason, fix=row.fix)


def clip_is_used(recipe: Recipe, scene: Scene) -> Iterator[Problem]:
    """Some algorithms do not clip."""
    facts = CATALOG.get(recipe.algorithm.name)
    if facts and facts.clip is None and recipe.algorithm.clip is not None:
        yield Problem(field="algorithm.clip", reason=f"has no effect: {facts.name} does not clip", fix="leave it out")


def warmup_rate_is_used(recipe: Recipe, scene: Scene) -> Iterator[Problem]:
    """Without warm-up there is no rate to warm up with."""
    scratch = recipe.model.scratch
    if scratch and scratch.warmup_steps == 0 and scratch.warmup_lr != type(scratch)().warmup_lr:
        yield Problem(
            field="model.scratch.warmup_lr",
            reason="has no effect while model.scratch.warmup_steps is 0",
            fix="leave it out, or give warmup_steps",
        )


def best_is_measured(recipe: Recipe, scene: Scene) -> Iterator[Problem]:
    """A checkpoint cannot be the best by a number that nobody takes."""
    best = recipe.checkpoint.best or ""
    if recipe.evaluate.every == 0 and best.startswith("eval/") and best_was_asked(recipe):
        yield Problem(
            field="checkpoint.best",
            reason=f"{best} is never measured while evaluate.every is 0",
            fix="use another metric or null, or set evaluate.every",
        )
    elif recipe.checkpoint.best is not None and not _is_metric(best, recipe):
        yield Problem(
            field="checkpoint.best",
            reason=f"{best!r} is no metric of metrics.jsonl",
            fix=f"use one of {', '.join(METRICS)}, reward/part/NAME, or null",
        )


METRICS = ("eval/accuracy", "eval/low", "eval/high", "reward/mean", "reward/outcome", "loss", "kl/reference")
"""Metrics that say which of two checkpoints is better: of a loss and a KL less, of the others more."""


def _is_metric(name: str, recipe: Recipe) -> bool:
    return name in METRICS or name in {f"reward/part/{part.name}" for part in recipe.rewards}
