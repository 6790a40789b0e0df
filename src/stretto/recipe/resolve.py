"""Fills in what depends on other keys, so that a printed recipe hides no number, and writes a recipe down.

Only keys that were left open are filled, never one that was given; `auto` stays where it is decided while running.
Resolving twice changes nothing, and what `dump` writes loads back equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal, TypeVar

from stretto.algorithms.catalog import AlgorithmFacts, find_facts, learns_from_rows
from stretto.recipe import yaml_io as document
from stretto.recipe.schema import (
    AlgorithmSection,
    BatchSection,
    ColumnsSource,
    Correction,
    CosineReward,
    Distill,
    Gae,
    LatestSource,
    ModelSection,
    OverlongReward,
    Recipe,
    RewardPart,
    RoleModel,
    Scratch,
    StringsSource,
    TaskSection,
    UpdateSection,
    Vstar,
)

FULL, LORA = 0.004, 5e-4
"""Numerators of `default_rate` under a policy gradient: all weights, LoRA."""

FULL_FROM_ROWS, LORA_FROM_ROWS = 0.008, 4e-3
"""The same in SFT, of reward models and of critics, whose gradients have less noise."""

WARM_UP = 5
"""Updates of warm-up before a rate that was not stated. The first updates of Adam are as large as the rate, however few
groups they come from."""

ASSUMED_WIDTH = 4096
"""Hidden size that `auto` counts with where a model's files do not say it."""

Width = Callable[[ModelSection | RoleModel], int | None]
"""Hidden size of a model, or `None` where it is not known."""


def resolve(recipe: Recipe, width: Width = attrgetter("width")) -> Recipe:
    """The recipe with every value that follows from another. A learning rate stays `auto` where `width` is `None`."""
    if taught_alone(recipe):
        recipe = _without_verdicts(recipe)
    model, algorithm, checkpoint = recipe.model, recipe.algorithm, recipe.checkpoint
    if model.name == "scratch" and model.scratch is None:
        model = model.model_copy(update={"scratch": Scratch()})
    context = model.scratch.context if model.name == "scratch" and model.scratch else None
    long = context is not None and 1 < context <= recipe.engine.max_new_tokens
    if context is not None and long and "max_new_tokens" not in recipe.engine.model_fields_set:
        engine = recipe.engine.model_copy(update={"max_new_tokens": context // 2})
        recipe = recipe.model_copy(update={"engine": engine})
    if facts := find_facts(algorithm.name):
        algorithm = algorithm.model_copy(update=open_numbers(algorithm, facts, longest=recipe.engine.max_new_tokens))
    lora, rows = model.adapter is not None, facts is not None and facts.rows != "prompts"
    updates = recipe.planned_updates()
    optimizer = _with_rate(recipe.optimizer, width(model), updates, lora=lora, from_rows=rows)
    roles, critic = recipe.roles, recipe.roles.critic
    if critic is not None and critic.optimizer is not None:
        begins_as = model if critic.name in (None, "scratch") and critic.shape is None else critic
        lora, updates = critic.adapter is not None, recipe.planned_updates(critic=True)
        rate = _with_rate(critic.optimizer, width(begins_as), updates, lora=lora, from_rows=True)
        roles = roles.model_copy(update={"critic": critic.model_copy(update={"optimizer": rate})})
    if recipe.task.holdout.prompts == 0 and not evaluation_was_asked(recipe):
        recipe = recipe.model_copy(update={"evaluate": recipe.evaluate.model_copy(update={"every": 0})})
    if recipe.evaluate.every == 0 and not best_was_asked(recipe):
        checkpoint = checkpoint.model_copy(update={"best": None})
    parts = tuple(resolve_part(part, longest=recipe.engine.max_new_tokens) for part in recipe.rewards)
    if facts and facts.rows != "prompts":
        recipe = _without_sampling(recipe, facts)
        parts = parts if "rewards" in recipe.model_fields_set else ()
        if model.scratch and "warmup_steps" not in model.scratch.model_fields_set:
            model = model.model_copy(update={"scratch": model.scratch.model_copy(update={"warmup_steps": 0})})
        if checkpoint.best and not parts and facts.rows == "demonstrations" and not best_was_asked(recipe):
            checkpoint = checkpoint.model_copy(update={"best": "eval/loss"})
    return recipe.model_copy(
        update={
            "model": model,
            "roles": roles,
            "task": _possible_task(recipe.task, held_out=recipe.evaluate.prompts),
            "algorithm": algorithm,
            "batch": _possible_lengths(recipe.batch, recipe.engine.max_new_tokens),
            "optimizer": optimizer,
            "checkpoint": checkpoint,
            "rewards": parts,
        }
    )


Updating = TypeVar("Updating", bound=UpdateSection)


def default_rate(width: int, *, lora: bool, from_rows: bool) -> float:
    """Return the learning rate that `auto` stands for at a hidden size, to two digits.

    Full fine-tuning: a constant / hidden size. LoRA: a constant / sqrt(hidden size). `from_rows` is true in SFT, of
    reward models and of critics.
    """
    full, root = (FULL_FROM_ROWS, LORA_FROM_ROWS) if from_rows else (FULL, LORA)
    return float(f"{root / math.sqrt(width) if lora else full / width:.1e}")


def _with_rate(section: Updating, width: int | None, updates: int, *, lora: bool, from_rows: bool) -> Updating:
    """Return the optimizer with the number that `auto` means, and with the warm-up that goes with it."""
    if section.lr != "auto":
        return section
    found: dict[str, Any] = {} if width is None else {"lr": default_rate(width, lora=lora, from_rows=from_rows)}
    if "warmup" not in section.model_fields_set:
        found["warmup"] = min(WARM_UP, max(0, updates - 1))
    return section.model_copy(update=found)


def taught_alone(recipe: Recipe) -> bool:
    """True where a teacher says all that is learned, so that nobody need judge an answer."""
    facts = find_facts(recipe.algorithm.name)
    return facts is not None and facts.taught and getattr(recipe.algorithm, "reward_weight", 0.0) == 0


def _without_verdicts(recipe: Recipe) -> Recipe:
    """What is open where a teacher alone is learned from: nobody judges, so there is no accuracy. What an algorithm of
    the user's makes of rewards nobody knows."""
    found: dict[str, Any] = {}
    if "rewards" not in recipe.model_fields_set and isinstance(recipe.algorithm, Distill):
        found["rewards"] = ()
    if not found.get("rewards", recipe.rewards):
        if not evaluation_was_asked(recipe):
            found["evaluate"] = recipe.evaluate.model_copy(update={"every": 0})
        if not best_was_asked(recipe):
            found["checkpoint"] = recipe.checkpoint.model_copy(update={"best": None})
    return recipe.model_copy(update=found)


def _possible_task(task: TaskSection, *, held_out: Literal["auto"] | int) -> TaskSection:
    """Return the task with the largest possible counts where they are unset.

    It holds out as many prompts as an evaluation needs; a later evaluation with other settings keeps the split.
    """
    if task.holdout.prompts == "auto" and held_out != "auto":
        task = task.model_copy(update={"holdout": task.holdout.model_copy(update={"prompts": held_out})})
    source = task.source
    if isinstance(source, StringsSource):
        return task.model_copy(update={"source": source.model_copy(update={"count": source.wanted})})
    if isinstance(source, LatestSource):
        return task.model_copy(update={"source": source.model_copy(update={"letters": source.each})})
    return task


def _possible_lengths(batch: BatchSection, longest: int) -> BatchSection:
    """Return the batch with lengths of answers that are left open, none longer than an answer can be."""
    if batch.lengths is None or batch.lengths.from_run is not None:
        return batch
    response, found = batch.lengths.response, dict[str, Any]()
    if "cap" not in response.model_fields_set:
        found["cap"] = min(longest, response.cap) if response.mean <= response.cap else longest
    if "mean" not in response.model_fields_set:
        found["mean"] = min(response.mean, float(found.get("cap", response.cap)))
    lengths = batch.lengths.model_copy(update={"response": response.model_copy(update=found)})
    return batch.model_copy(update={"lengths": lengths})


def _without_sampling(recipe: Recipe, facts: AlgorithmFacts) -> Recipe:
    """What is open where rows of the task are learned from: what a row is, and that each is there once."""
    found: dict[str, Any] = {}
    source = recipe.task.source
    if isinstance(source, ColumnsSource) and "rows" not in source.model_fields_set:
        read = source.model_copy(update={"rows": facts.rows})
        found["task"] = recipe.task.model_copy(update={"source": read})
    if "samples" not in recipe.batch.model_fields_set:
        found["batch"] = recipe.batch.model_copy(update={"samples": 1})
    return recipe.model_copy(update=found)


def open_numbers(algorithm: AlgorithmSection, facts: AlgorithmFacts, *, longest: int) -> dict[str, Any]:
    """The keys of `algorithm` that a recipe leaves open and its algorithm reads."""
    usual: dict[str, Any] = {"clip": facts.clip}
    if facts.constant:
        usual["constant"] = longest
    if "values" in facts.needs:
        usual["gae"] = Gae()
    if "vstar" in facts.needs:
        usual["vstar"] = Vstar()
    keys = type(algorithm).model_fields
    found = {key: value for key, value in usual.items() if key in keys and getattr(algorithm, key) is None}
    if facts.regresses and "correction" not in algorithm.model_fields_set:
        found["correction"] = Correction(kind="none")
    return found


def resolve_part(part: RewardPart, *, longest: int) -> RewardPart:
    """A part of the reward with what it leaves open."""
    if isinstance(part, CosineReward):
        return part.model_copy(update={"longest": part.longest or longest})
    if not isinstance(part, OverlongReward):
        return part
    longest = part.longest or longest
    return part.model_copy(update={"longest": longest, "buffer": part.buffer or max(1, longest // 5)})


def longest_prompt(recipe: Recipe, context: int) -> int | None:
    """Tokens of the longest prompt, or row to learn from, that is not dropped, in a model of this context; none where
    nothing is dropped."""
    given = recipe.task.drop_longer_than
    if given == "auto" and learns_from_rows(recipe.algorithm.name):
        return context
    return context - recipe.engine.max_new_tokens if given == "auto" else given


def vstar_of(recipe: Recipe) -> Vstar:
    """The numbers of the table that A*PO, or an algorithm of the user's, regresses on."""
    return getattr(recipe.algorithm, "vstar", None) or Vstar()


def evaluation_was_asked(recipe: Recipe) -> bool:
    """True if the recipe itself says how often it evaluates, rather than the default."""
    return "evaluate" in recipe.model_fields_set and "every" in recipe.evaluate.model_fields_set


def best_was_asked(recipe: Recipe) -> bool:
    """True if the recipe itself says which checkpoint is best, rather than the default."""
    return "checkpoint" in recipe.model_fields_set and "best" in recipe.checkpoint.model_fields_set


def dump(recipe: Recipe) -> str:
    """The recipe as YAML, every key in the schema's order."""
    return document.write(recipe.model_dump(mode="json"))
