"""Numbers that contradict each other, or that nothing could be run with.

The bounds of single keys are the schema's. Here one number is too large or too small for another, or only looks
harmless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any

from stretto.algorithms.catalog import find_facts
from stretto.checks.rules.base import CheckContext
from stretto.errors import Problem
from stretto.extras import install
from stretto.recipe.schema import EVALUATED, NativeEngineSection, Recipe, UpdateSection
from stretto.recipe.time_limit import EXAMPLES, seconds_until

MOST = 2**31 - 1
"""The largest count; what counts tokens or steps with 32 bits must never overflow."""

MOST_PARAMETERS = 200_000_000
"""A scratch model above is no tiny decoder, and no short warm-up would bring it anywhere."""

LONGEST_CONTEXT = 65_536
"""Longest context of a scratch model; its cache is made for it."""

MOST_TRAJECTORIES = 1_000_000
"""In one step or evaluation; the largest published runs use tens of thousands."""

HIGHEST_RANK = 8192
"""Of an adapter; the width of the largest models in use."""


def group_is_large_enough(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A baseline from the group needs a group."""
    facts, samples = find_facts(recipe.algorithm.name), recipe.batch.samples
    if facts and samples < facts.min_samples:
        yield Problem(
            field="batch.samples",
            reason=f"{samples} is too few for {facts.name}, which compares the samples of a group",
            fix=f"use at least {facts.min_samples}, or algorithm.name: reinforce",
        )


def updates_have_trajectories(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """An update needs something to learn from."""
    updates, made = recipe.batch.updates, recipe.batch.prompts * recipe.batch.samples
    if updates > made:
        yield Problem(
            field="batch.updates",
            reason=f"{updates} updates cannot share {made} trajectories (batch.prompts x batch.samples)",
            fix=f"use at most {made}",
        )


def budget_holds_an_answer(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A conversation is never split between micro-batches."""
    budget, longest = recipe.batch.token_budget, recipe.engine.max_new_tokens
    if isinstance(budget, int) and budget <= longest and scene.training:
        yield Problem(
            field="batch.token_budget",
            reason=f"{budget} tokens cannot hold a prompt and an answer of engine.max_new_tokens ({longest})",
            fix="use auto, or several times the longest conversation",
        )


def lengths_make_sense(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What is planned with can happen."""
    told, longest = recipe.batch.lengths, recipe.engine.max_new_tokens
    if told is None or told.from_run is not None or not scene.training:
        return
    if told.response.cap > longest:
        reason = f"{told.response.cap} is above engine.max_new_tokens ({longest}), where every answer ends"
        yield Problem(field="batch.lengths.response.cap", reason=reason, fix="raise engine.max_new_tokens")
    if told.response.mean > told.response.cap:
        reason = f"a mean of {told.response.mean:g} is above the cap of {told.response.cap}"
        yield Problem(field="batch.lengths.response", reason=reason, fix="raise cap or lower mean")


def step_fits(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A step's trajectories, and those of an evaluation, are held in memory."""
    batch, evaluate = recipe.batch, recipe.evaluate
    for fields, number in (
        ("batch.prompts x batch.samples", batch.prompts * batch.samples),
        ("evaluate.prompts x evaluate.pass_k", evaluate.limit * evaluate.pass_k),
    ):
        if number > MOST_TRAJECTORIES:
            yield Problem(
                field=fields.rpartition(" ")[2],
                reason=f"{fields} is {number} trajectories, more than can be held at once",
                fix=f"stay below {MOST_TRAJECTORIES}",
            )


def warmup_ends(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A warm-up that never ends never reaches the learning rate."""
    for name, section in optimizers(recipe):
        updates, of = recipe.planned_updates(critic=name != "optimizer"), "run.steps x batch.epochs x batch.updates"
        if section.warmup >= updates > 0:
            if updates < recipe.planned_updates(critic=True):
                of += ", without those of roles.critic.warmup_steps"
            told = f"{section.warmup} updates of warm-up leave none of the run's {updates} ({of})"
            yield Problem(field=f"{name}.warmup", reason=told, fix=f"use less than {updates}")


def optimizers(recipe: Recipe) -> Iterator[tuple[str, UpdateSection]]:
    """Those of the policy and of a critic that is trained, by their dotted names."""
    yield "optimizer", recipe.optimizer
    if recipe.roles.critic is not None and recipe.roles.critic.optimizer is not None:
        yield "roles.critic.optimizer", recipe.roles.critic.optimizer


def time_is_readable(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """When a run is to be over can be told."""
    until = recipe.run.until
    try:
        if until is not None and seconds_until(until, datetime.now(UTC)) <= 0 and scene.training:
            yield Problem(field="run.until", reason=f"{until} is over", fix=EXAMPLES)
    except ValueError as error:
        yield Problem(field="run.until", reason=str(error), fix=EXAMPLES)


def moments_decay(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """AdamW divides by 1 - beta."""
    for name, section in optimizers(recipe):
        for index, beta in enumerate(section.betas):
            if beta >= 1:
                yield Problem(
                    field=f"{name}.betas.{index}",
                    reason=f"with {beta:g} the moment would never change",
                    fix="use a number below 1, such as 0.9",
                )


def rounded_sums_are_possible(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Gradients are rounded where several devices add them up."""
    if recipe.optimizer.reduce == "exact":
        return
    if recipe.model.dtype == "float64":
        reason = "sums in bfloat16 make no sense beside weights in float64"
        yield Problem(field="optimizer.reduce", reason=reason, fix="use exact, or model.dtype: float32")
    if recipe.placement.cluster in ("1xcpu", "1xgpu"):
        reason = "has no effect on one device, which has nothing to add up"
        yield Problem(field="optimizer.reduce", reason=reason, fix="leave it out, or name more devices")


def narrow_moments_are_possible(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Whoever computes in fp64 wants every bit."""
    for name, section in optimizers(recipe):
        if section.name != "adamw" and recipe.model.dtype == "float64":
            reason = f"the moments of {section.name} make no sense beside weights in float64"
            yield Problem(field=f"{name}.name", reason=reason, fix="use adamw, or model.dtype: float32")


def quantised_base_is_frozen(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Few bits hold what stays as it is; NF4 comes from a package of its own."""
    kind = recipe.model.quantize
    if kind == "none":
        return
    if recipe.model.adapter is None:
        reason = f"{kind} is for a frozen base, and without an adapter all weights are trained"
        yield Problem(field="model.quantize", reason=reason, fix="set model.adapter, or use none")
    if kind == "auto" and recipe.placement.cells is not None:
        reason = "auto weighs the plans of strategies, and placement.cells is one by hand"
        yield Problem(field="model.quantize", reason=reason, fix="name none, int8 or nf4, or leave placement.cells out")
    if kind == "nf4" and not scene.planning and find_spec("bitsandbytes") is None:
        reason = "nf4 needs the package bitsandbytes, which is not installed"
        yield Problem(field="model.quantize", reason=reason, fix=f"{install('quant')}, or use int8")


def cache_has_memory(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Nothing can be generated without a cache."""
    if recipe.engine.memory_share == 0:
        yield Problem(
            field="engine.memory_share", reason="0 leaves no memory for the cache", fix="use auto, or such as 0.5"
        )


def updates_are_sane(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """AdamW moves every weight by about the learning rate: at 1 nothing of the model is left after one update."""
    for name, section in optimizers(recipe):
        if isinstance(section.lr, float) and section.lr > 1:
            reason = f"{section.lr:g} moves every weight by about as much in each update"
            yield Problem(field=f"{name}.lr", reason=reason, fix="use at most 1; 1e-6 to 1e-3 are usual")
    kl = getattr(recipe.algorithm, "kl", None)
    if kl is not None and kl.coef > 100:
        reason = f"{kl.coef:g} times the KL leaves nothing of the reward"
        yield Problem(field="algorithm.kl.coef", reason=reason, fix="use at most 100; 0.001 to 0.1 are usual")


def temperature_is_sane(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Far out, nothing of the model's distribution is left, and log-probabilities overflow."""
    temperature = recipe.engine.temperature
    if not 0.01 <= temperature <= 100:
        yield Problem(
            field="engine.temperature",
            reason=f"{temperature:g} leaves nothing of the model's distribution",
            fix="use a number from 0.01 to 100; 1.0 is usual, and evaluation is greedy anyway",
        )


def engine_says_what_it_kept(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What is drawn from a part of the distribution can be trained on only where that part comes with it."""
    engine = recipe.engine
    if engine.top_p < 1 and not isinstance(engine, NativeEngineSection):
        reason = f"{engine.kind} does not say which tokens {engine.top_p:g} leaves, so training would be on another "
        reason += "distribution than the one that is sampled"
        yield Problem(field="engine.top_p", reason=reason, fix="use 1.0, or engine.kind: native")


def adapter_is_small(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """An adapter adapts something, and has a rank below the rank of that."""
    adapter, scratch = recipe.model.adapter, recipe.model.scratch
    if adapter and not adapter.targets:
        yield Problem(field="model.adapter.targets", reason="names no layer", fix="use all-linear, or name layers")
    most, whose = (scratch.width, " (model.scratch.width)") if scratch else (HIGHEST_RANK, "")
    if adapter and adapter.rank > most:
        yield Problem(
            field="model.adapter.rank",
            reason=f"{adapter.rank} is above {most}{whose}, so the adapter would be larger than what it adapts",
            fix="use a low rank such as 16, or adapter: null to train everything",
        )


def heads_divide_width(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Every head gets an equal share of the width, in pairs that are rotated."""
    scratch = recipe.model.scratch
    if scratch and scratch.width % (2 * scratch.heads):
        yield Problem(
            field="model.scratch.width",
            reason=f"{scratch.width} does not give each of {scratch.heads} model.scratch.heads the same even share",
            fix=f"use a multiple of {2 * scratch.heads}",
        )


def scratch_is_tiny(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A model made on the spot must be one that can be warmed up on the spot."""
    scratch = recipe.model.scratch
    if scratch is None:
        return
    parameters = 16 * scratch.layers * scratch.width**2 + scratch.width * len(scratch.characters)
    if scratch.context > LONGEST_CONTEXT:
        yield Problem(
            field="model.scratch.context",
            reason=f"{scratch.context} tokens are too many for a tiny model",
            fix=f"use at most {LONGEST_CONTEXT}",
        )
    if parameters > MOST_PARAMETERS:
        yield Problem(
            field="model.scratch",
            reason=f"would have about {parameters / 1e6:,.0f} million parameters, too many without pretraining",
            fix="use fewer layers or less width, or a pretrained model",
        )


def scratch_holds_an_answer(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Prompt and answer share the context."""
    scratch, longest = recipe.model.scratch, recipe.engine.max_new_tokens
    if recipe.model.name == "scratch" and scratch and scratch.context <= longest:
        yield Problem(
            field="model.scratch.context",
            reason=f"{scratch.context} tokens cannot hold a prompt and an answer of engine.max_new_tokens ({longest})",
            fix="use a longer context or shorter answers",
        )


def evaluation_has_prompts(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Accuracy is taken on held-out prompts only."""
    wanted, held, every = recipe.evaluate.prompts, recipe.task.holdout.prompts, recipe.evaluate.every
    if held == 0 and every > 0:
        yield Problem(
            field="task.holdout.prompts",
            reason=f"no prompts are held out, but evaluate.every is {every}",
            fix="hold some out, or set evaluate.every to 0",
        )
    elif wanted != "auto" and held != "auto" and wanted > held and (every > 0 or wanted != EVALUATED):
        yield Problem(
            field="evaluate.prompts",
            reason=f"{wanted} is more than the {held} prompts of task.holdout.prompts",
            fix=f"use at most {held}, or hold out more",
        )


def stale_answers_are_corrected(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Answers of older weights are trained on with importance weights, or not at all."""
    facts, lag = find_facts(recipe.algorithm.name), recipe.placement.staleness
    if not lag or recipe.algorithm.correction.kind != "none":
        return
    if facts and facts.regresses:
        reason = f"{lag} needs importance weights, and {facts.name} (algorithm.name) has none"
        yield Problem(field="placement.staleness", reason=reason, fix="use 0, or another algorithm, such as grpo")
        return
    reason = f"is none, but with placement.staleness {lag} answers come from older weights"
    yield Problem(field="algorithm.correction.kind", reason=reason, fix="use token, or placement.staleness: 0")


def seeds_fit(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Random generators take whole numbers that are not negative."""
    for field, seed in (("seed", recipe.seed), ("task.holdout.seed", recipe.task.holdout.seed)):
        if seed < 0:
            yield Problem(field=field, reason=f"{seed} is negative", fix="use 0 or more")


def counts_fit(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A slip of the keyboard is caught before it allocates."""
    for field, value in _numbers(recipe.model_dump(), ""):
        if value > MOST and not field.endswith("seed") and not field.startswith("task.source.config."):
            reason = f"{value} is larger than anything here can count"
            yield Problem(field=field, reason=reason, fix=f"use at most {MOST}")


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, Mapping | tuple):
        for key, below in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _numbers(below, f"{name}.{key}" if name else str(key))
    elif isinstance(value, int):
        yield name, value
