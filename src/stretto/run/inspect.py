"""The second tier of checks: what only the tokenizer, all prompts and the model's layers can tell. Loads no weights.

The first tier (`config.check`) reads the recipe and the first rows of the data without torch; `train` runs both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from stretto.config.locate import ModelFiles, locate
from stretto.config.rules.roles import CLASSIFIERS, classifier_problems
from stretto.config.rules.task import comparisons
from stretto.config.schema import Recipe, Scratch
from stretto.errors import Problem, RecipeError
from stretto.rewards import answer
from stretto.rollout.render import Renderer
from stretto.tasks.source import load_prompts, split
from stretto.train.adapters import target_problems
from stretto.train.model import describe, refuse_moving_positions, refuse_unknown_attention
from stretto.train.scratch import UNKNOWN, character_tokenizer, configuration
from stretto.types import Prompt

MOST_PROMPTS = 20_000
"""Prompts whose length is measured; a longer one that slips through costs its own trajectory, not the run."""

UNLIMITED = 1 << 30
"""Context of a model that does not say one."""

SHOWN = 3
"""Offending prompts named in a message."""


def deep_problems(recipe: Recipe, root: Path) -> list[Problem]:
    """Every problem of the second tier."""
    problems = device_problems(recipe)
    try:
        prompts = load_prompts(recipe.task, root)
        split(prompts, recipe.task.holdout)
        files = locate(recipe.model.name, root)
        config, tokenizer = describe_model(recipe, files)
        refuse_moving_positions(config)
    except RecipeError as error:
        return [*problems, *error.problems]
    others, context = other_models(recipe, root, tokenizer)
    context = min(context, int(getattr(config.get_text_config(), "max_position_embeddings", None) or context))
    problems += [
        *comparisons(recipe, prompts, answer.numbers),
        *prompt_problems(recipe, prompts, context, tokenizer),
        *others,
    ]
    if recipe.model.adapter is not None:
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
        problems += target_problems(recipe.model.adapter.targets, network, network.get_output_embeddings())
    return problems


def device_problems(recipe: Recipe) -> list[Problem]:
    """A GPU that was asked for must be there."""
    if recipe.placement.cluster != "1xgpu" or torch.cuda.is_available():
        return []
    return [
        Problem(
            field="placement.cluster",
            reason="asks for a GPU, and torch sees none on this machine",
            fix="use auto or 1xcpu, or install a torch build for this machine's GPU",
        )
    ]


def describe_model(recipe: Recipe, files: ModelFiles) -> tuple[Any, Any]:
    """Configuration and tokenizer of the model that would be trained."""
    if files.kind == "scratch":
        scratch = recipe.model.scratch or Scratch()
        return configuration(scratch), character_tokenizer(scratch.characters)
    try:
        return describe(files)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecipeError.of(
            "model.name", f"{files.name} cannot be read: {first_line}", "name a language model with its tokenizer"
        ) from error


def other_models(recipe: Recipe, root: Path, tokenizer: Any) -> tuple[list[Problem], int]:
    """What is wrong with reward model and critic beside the model that is trained, and the shortest of their contexts.

    They read token ids, which nobody decodes, so each id has to mean the same to them.
    """
    problems, contexts = list[Problem](), [UNLIMITED]
    for key in CLASSIFIERS:
        section = getattr(recipe.roles, key)
        if section is None or section.name in (None, "scratch"):
            continue
        try:
            config, its = describe_model(recipe, locate(section.name, root))
            refuse_unknown_attention(config)
        except RecipeError as error:
            problems += [replace(problem, field=f"roles.{key}.name") for problem in error.problems]
            continue
        problems += classifier_problems(section.name, key, root)  # a model of the hub is on this machine only now
        text = config.get_text_config()
        contexts.append(int(getattr(text, "max_position_embeddings", None) or UNLIMITED))
        ids, its_ids = tokenizer.get_vocab(), its.get_vocab()
        if others := [token for token, number in ids.items() if its_ids.get(token) != number]:
            reason = f"{len(others)} of the {len(ids)} tokens of model.name have other ids in it, such as {others[0]!r}"
            fix = "name one that was made from a model with the same tokenizer"
            problems.append(Problem(field=f"roles.{key}.name", reason=reason, fix=fix))
        elif text.vocab_size <= max(ids.values()):
            reason = f"it has embeddings for {text.vocab_size} tokens, and model.name has ids up to {max(ids.values())}"
            problems.append(Problem(field=f"roles.{key}.name", reason=reason, fix="name one with all of them"))
    return problems, min(contexts)


def prompt_problems(recipe: Recipe, prompts: Sequence[Prompt], context: int, tokenizer: Any) -> list[Problem]:
    """Prompts that leave no room for an answer, and those that a character tokenizer cannot spell or answer."""
    renderer = Renderer(tokenizer, stop=frozenset())
    room = context - recipe.engine.max_new_tokens
    unknown = tokenizer.convert_tokens_to_ids(UNKNOWN) if recipe.model.name == "scratch" else None
    too_long: list[str] = []
    misspelt: list[str] = []
    for prompt in prompts[:MOST_PROMPTS]:
        try:
            tokens = renderer.open(prompt.messages)
        except Exception as error:  # a template is a program of the model's authors and may raise anything
            return [
                Problem(
                    field="task",
                    reason=f"the model's chat template cannot render prompt {prompt.id}: {error}",
                    fix="drop task.system, or use another model",
                )
            ]
        if len(tokens) > room:
            too_long.append(f"{prompt.id} ({len(tokens)} tokens)")
        if unknown is not None and unknown in [*tokens, *tokenizer.encode(prompt.reference or "")]:
            misspelt.append(prompt.id)
    problems = []
    if too_long:
        problems.append(
            Problem(
                field="task",
                reason=f"{len(too_long)} prompts leave no room for {recipe.engine.max_new_tokens} new tokens in a "
                f"context of {context}: {', '.join(too_long[:SHOWN])}",
                fix="shorten or drop them, lower engine.max_new_tokens, or use a model with a longer context",
            )
        )
    if misspelt:
        problems.append(
            Problem(
                field="model.scratch.characters",
                reason=f"{len(misspelt)} prompts or their answers use characters that are not in it: "
                f"{', '.join(misspelt[:SHOWN])}",
                fix="add every character that prompts and answers use",
            )
        )
    return problems
