"""Keys that would change nothing where they stand: a recipe that sets one says something that is not true.

A key counts as set when its value differs from its default, so a recipe that was resolved and written down stays
legal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from stretto.algorithms.catalog import PULLING, AlgorithmFacts, find_facts
from stretto.checks.rules.base import CheckContext, is_default
from stretto.errors import Problem, RecipeError
from stretto.placement.build import uses_gpu
from stretto.recipe.resolve import best_was_asked, taught_alone
from stretto.recipe.schema import NativeEngineSection, OwnAlgorithm, Recipe, Vstar


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedKey:
    """A key that has no effect while another has a certain value."""

    field: str
    """The key's dotted name."""
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


def _no_estimate(recipe: Recipe) -> bool:
    """An estimator that is spelled out where `auto` is the same says nothing new, as recipes of older runs do."""
    kl = recipe.algorithm.kl
    return kl.coef == 0 and kl.estimator != PULLING[kl.where]


def _known(recipe: Recipe, fact: Callable[[AlgorithmFacts], bool]) -> bool:
    """Whether something is true of the recipe's algorithm; an unknown one is another rule's problem."""
    facts = find_facts(recipe.algorithm.name)
    return facts is not None and fact(facts)


def _without(need: str) -> Callable[[Recipe], bool]:
    """Whether the recipe's algorithm can do without a stream."""
    return lambda recipe: _known(recipe, lambda facts: need not in facts.needs)


def _never_drops(recipe: Recipe) -> bool:
    return _known(recipe, lambda facts: not facts.drops)


def _regresses(recipe: Recipe) -> bool:
    return _known(recipe, lambda facts: facts.regresses)


IDLE = (
    UnusedKey(field="algorithm.kl.estimator", when=_no_estimate, reason=NO_KL, fix=NO_KL_FIX),
    UnusedKey(field="algorithm.kl.where", when=_no_kl, reason=NO_KL, fix=NO_KL_FIX),
    UnusedKey(
        field="roles.reference",
        when=lambda recipe: _no_kl(recipe) and _without("reference")(recipe),
        reason=NO_KL,
        fix=NO_KL_FIX,
    ),
    UnusedKey(
        field="algorithm.kl.coef",
        when=_regresses,
        reason="has no effect: what pulls algorithm.name towards the reference is algorithm.vstar.beta2",
        fix="leave it out",
    ),
    UnusedKey(
        field="algorithm.correction.cap",
        when=lambda recipe: recipe.algorithm.correction.kind == "none",
        reason="has no effect while algorithm.correction.kind is none",
        fix="leave it out, or use kind: token",
    ),
    UnusedKey(
        field="batch.oversample",
        when=_never_drops,
        reason="has no effect but to throw answers away, because algorithm.name drops no groups",
        fix="leave it out, or raise batch.prompts",
    ),
    UnusedKey(
        field="model.scratch",
        when=lambda recipe: recipe.model.name != "scratch",
        reason="has no effect unless model.name is scratch",
        fix="leave it out, or use name: scratch",
    ),
    UnusedKey(
        field="task.holdout.seed",
        when=lambda recipe: recipe.task.holdout.prompts == 0,
        reason="has no effect while task.holdout.prompts is 0",
        fix="leave it out, or hold some prompts out",
    ),
    UnusedKey(
        field="batch.max_rounds",
        when=_never_drops,
        reason="has no effect, because algorithm.name drops no groups and so never samples again",
        fix="leave it out",
    ),
)


def keys_have_an_effect(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Every row of the table."""
    for row in IDLE:
        if not is_default(recipe, row.field) and row.when(recipe):
            yield Problem(field=row.field, reason=row.reason, fix=row.fix)


def own_algorithm_reads_them(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What an algorithm of the user's reads is in its facts, not in its name."""
    section, facts = recipe.algorithm, find_facts(recipe.algorithm.name)
    if facts is None or not isinstance(section, OwnAlgorithm):
        return
    for key, read, why in (
        ("clip", facts.clip is not None, "does not clip"),
        ("constant", facts.constant, "divides by counts alone"),
        ("vstar", "vstar" in facts.needs, "reads no table of V*"),
        ("gae", "values" in facts.needs, "has no critic"),
    ):
        if not read and getattr(section, key) is not None:
            reason = f"has no effect, because {section.name} {why}, by what its file says"
            yield Problem(field=f"algorithm.{key}", reason=reason, fix="leave it out, or change FACTS in the file")


def correction_is_used(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A regression that holds for answers of any policy has no use for importance weights."""
    if _regresses(recipe) and recipe.algorithm.correction.kind != "none":
        reason = f"has no effect: the regression of {recipe.algorithm.name} holds for answers of any policy"
        yield Problem(field="algorithm.correction.kind", reason=reason, fix="leave it out")


def betas_are_used(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The course's variant takes the largest reward and regresses on nothing."""
    given = getattr(recipe.algorithm, "vstar", None)
    if given is None or _regresses(recipe) or not _known(recipe, lambda facts: "vstar" in facts.needs):
        return
    for key in ("beta1", "beta2"):
        if getattr(given, key) != getattr(Vstar(), key):
            reason = f"has no effect: {recipe.algorithm.name} takes the largest reward as V* and does not regress"
            yield Problem(field=f"algorithm.vstar.{key}", reason=reason, fix="leave it out, or use astar_po")


def warmup_rate_is_used(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Without warm-up there is no rate to warm up with."""
    scratch = recipe.model.scratch
    if scratch and scratch.warmup_steps == 0 and scratch.warmup_lr != type(scratch)().warmup_lr:
        yield Problem(
            field="model.scratch.warmup_lr",
            reason="has no effect while model.scratch.warmup_steps is 0",
            fix="leave it out, or give warmup_steps",
        )


def graphs_have_a_gpu(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Where no device is named, one may be a GPU."""
    if not (isinstance(recipe.engine, NativeEngineSection) and recipe.engine.graphs is True):
        return
    with suppress(RecipeError):  # a cluster that cannot be read is the plan's problem
        if not uses_gpu(recipe.placement, visible=True):
            reason = "has no effect: CUDA graphs are for GPUs, and placement.cluster names none"
            yield Problem(field="engine.graphs", reason=reason, fix="leave it out, or name GPUs")


def nccl_has_gpus(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Where no device is named, one may be a GPU; where several cells meet is the plan's business."""
    if not recipe.placement.nccl:
        return
    with suppress(RecipeError):  # a cluster that cannot be read is the plan's problem
        if not uses_gpu(recipe.placement, visible=True):
            reason = "has no effect: NCCL is for GPUs, and placement.cluster names none"
            yield Problem(field="placement.nccl", reason=reason, fix="leave it out, or name GPUs")


def stops_can_come(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A warning that is switched off ends no run."""
    for name in recipe.guards.stop_on:
        if getattr(recipe.guards, name) is None:
            reason = f"{name} has no effect, because guards.{name} is null and so never warns"
            fix = f"leave {name} out, or give guards.{name} a number"
            yield Problem(field="guards.stop_on", reason=reason, fix=fix)


def best_is_measured(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A checkpoint cannot be the best by a number that nobody takes."""
    if not scene.training:
        return
    best = recipe.checkpoint.best
    if best is None:
        return
    if not _is_metric(best, recipe):
        yield Problem(
            field="checkpoint.best",
            reason=f"{best!r} is no metric of metrics.jsonl",
            fix=f"use one of {', '.join(METRICS)}, reward/part/NAME, or null",
        )
    elif not _is_measured(best, recipe):
        yield Problem(
            field="checkpoint.best",
            reason=f"{best} is not measured where algorithm.name is {recipe.algorithm.name} and the rest as it is here",
            fix="use a metric that such a run has, such as loss, or null",
        )
    elif recipe.evaluate.every == 0 and best.startswith("eval/") and best_was_asked(recipe):
        yield Problem(
            field="checkpoint.best",
            reason=f"{best} is never measured while evaluate.every is 0",
            fix="use another metric or null, or set evaluate.every",
        )


METRICS = (
    "eval/accuracy", "eval/low", "eval/high", "eval/loss", "eval/brier", "eval/ece",
    "reward/mean", "reward/outcome", "loss", "kl/reference",
)  # fmt: skip
"""Metrics that say which of two checkpoints is better: of a loss and a KL less, of the others more."""


def _is_measured(name: str, recipe: Recipe) -> bool:
    """Whether the steps or evaluations of this recipe have a metric. What an algorithm of the user's needs is known
    only once it is built."""
    facts = find_facts(recipe.algorithm.name)
    if facts is None or isinstance(recipe.algorithm, OwnAlgorithm):
        return True
    if name == "kl/reference":
        return recipe.algorithm.kl.coef > 0 or "reference" in facts.needs
    if name in ("eval/brier", "eval/ece"):
        return facts.rows == "pairs"
    if name == "eval/loss":
        return facts.rows != "prompts"
    judged = bool(recipe.rewards) or (facts.rows == "prompts" and not taught_alone(recipe))
    if name.startswith("reward/"):
        return facts.rows == "prompts" and judged
    return not name.startswith("eval/") or facts.rows == "pairs" or judged


def _is_metric(name: str, recipe: Recipe) -> bool:
    return name in METRICS or name in {f"reward/part/{part.name}" for part in recipe.rewards}
