"""Fills in what depends on other keys, so that a printed recipe hides no number, and writes a recipe down.

Only keys that were left open are filled, never one that was given; `auto` stays where it is decided while running.
Resolving twice changes nothing, and what `dump` writes loads back equal.
"""

from __future__ import annotations

from typing import Any

from stretto.algorithms.catalog import AlgorithmFacts, find_facts, learns_from_rows
from stretto.recipe import yaml_io as document
from stretto.recipe.schema import (
    AlgorithmSection,
    ColumnsSource,
    Correction,
    CosineReward,
    Distill,
    Gae,
    OverlongReward,
    Recipe,
    RewardPart,
    Scratch,
    Vstar,
)

FULL_RATE = 1.5e-5
"""What `optimizer.lr` is, left open, when all weights of a pretrained model are trained: about a tenth of what
suits LoRA. SmolLM2-135M on addition learned with three seeds each; with 2e-5 its accuracy went up and down, with 3e-5
it fell back."""


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with every value that follows from another."""
    if taught_alone(recipe):
        recipe = _without_verdicts(recipe)
    model, algorithm, checkpoint = recipe.model, recipe.algorithm, recipe.checkpoint
    if model.name == "scratch" and model.scratch is None:
        model = model.model_copy(update={"scratch": Scratch()})
    if facts := find_facts(algorithm.name):
        algorithm = algorithm.model_copy(update=open_numbers(algorithm, facts, longest=recipe.engine.max_new_tokens))
    optimizer = recipe.optimizer
    if model.adapter is None and model.name != "scratch" and "lr" not in optimizer.model_fields_set:
        optimizer = optimizer.model_copy(update={"lr": FULL_RATE})
    roles, critic = recipe.roles, recipe.roles.critic
    if critic is not None and critic.optimizer is not None and critic.adapter is None:
        tiny = model.name == "scratch" and critic.name == "scratch"
        if not tiny and "lr" not in critic.optimizer.model_fields_set:
            rate = critic.optimizer.model_copy(update={"lr": FULL_RATE})
            roles = roles.model_copy(update={"critic": critic.model_copy(update={"optimizer": rate})})
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
            "algorithm": algorithm,
            "optimizer": optimizer,
            "checkpoint": checkpoint,
            "rewards": parts,
        }
    )


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
