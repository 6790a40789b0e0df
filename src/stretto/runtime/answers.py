"""What a model answers to prompts of anybody's: sampled as a step samples, judged by nobody.

A prompt is asked in a single turn, whatever environment the model was trained in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.algorithms.catalog import trains_reward_model
from stretto.environments.trajectory import RolloutStart
from stretto.errors import RecipeError
from stretto.recipe.resolve import resolve_part
from stretto.recipe.schema import OverlongReward, Placement, Recipe, SingleTurnSection
from stretto.runtime.runtime import Runtime
from stretto.runtime.schedule import sample
from stretto.types import Message, Prompt, StopReason, Trajectory

VISIT = -3
"""A visit number of its own, so that its noise is never that of a training sample or of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to one prompt."""

    prompt: str
    """What was asked: the last message."""
    attempt: int
    """Which of the answers to this prompt it is, from 0."""
    text: str
    """What the model said."""
    tokens: int
    """Tokens that were sampled."""
    stop: StopReason | None
    """Why it ended: `stop` of its own accord, `length` where it was cut off; none where it failed."""
    failure: str | None
    """Why there is no answer, if there is none."""


def prompts_of(given: str | Sequence[str | Sequence[Message]], *, system: str | None) -> list[Prompt]:
    """Texts, or lists of messages, as prompts; before a text comes the recipe's system message."""
    before = [{"role": "system", "content": system}] if system else []
    fix = 'give texts, or lists of messages such as [{"role": "user", "content": "..."}]'
    if not isinstance(given, str | list | tuple):
        raise RecipeError.of("prompts", f"is a {type(given).__name__} and no list of prompts", fix)
    prompts = []
    for index, each in enumerate([given] if isinstance(given, str) else given):
        messages = [*before, {"role": "user", "content": each}] if isinstance(each, str) else each
        if not isinstance(messages, list | tuple) or not messages or not all(map(_is_message, messages)):
            raise RecipeError.of(f"prompts.{index}", "is neither a text nor a list of messages", fix)
        prompts.append(Prompt(id=f"prompt {index}", messages=tuple(messages)))
    return prompts


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def only_sampling(recipe: Recipe) -> Recipe:
    """The recipe without what judges answers. RecipeError for one whose model gives none."""
    if trains_reward_model(recipe.algorithm.name):
        raise RecipeError.of(
            "algorithm.name", "a reward model answers nothing", "ask the model whose answers it judges"
        )
    nobody = resolve_part(OverlongReward(), longest=recipe.engine.max_new_tokens)  # compares with no reference
    return recipe.model_copy(
        update={
            "environment": SingleTurnSection(),
            "rewards": (nobody,),
            "roles": recipe.roles.model_copy(update={"reward_model": None}),
            "placement": _without_judges(recipe.placement),
            "evaluate": recipe.evaluate.model_copy(update={"every": 0}),
            "checkpoint": recipe.checkpoint.model_copy(update={"best": None}),
        }
    )


def _without_judges(section: Placement) -> Placement:
    """Where no reward model is asked: a cell or a fraction for one would have no work."""
    if section.cells is None:
        return section.model_copy(update={"strategy": "auto", "fractions": None, "staleness": 0})
    return section.model_copy(update={"cells": tuple(cell for cell in section.cells if cell.get("role") != "reward")})


async def answers(
    parts: Runtime, prompts: Sequence[Prompt], *, attempts: int, temperature: float | None, seed: int | None
) -> list[Answer]:
    """So many answers to each prompt, in order."""
    launches = [
        RolloutStart(prompt=prompt, visit=VISIT, attempt=attempt) for prompt in prompts for attempt in range(attempts)
    ]
    heat = parts.recipe.engine.temperature if temperature is None else temperature
    scored = await sample(parts, launches, temperature=heat, seed=seed, judged=False)
    return [_answer(trajectory) for trajectory in scored.failed]  # none of them has a verdict


def _answer(trajectory: Trajectory) -> Answer:
    outcome, last = trajectory.outcome, trajectory.conversations[-1] if trajectory.conversations else None
    content: Any = trajectory.prompt.messages[-1]["content"]
    return Answer(
        prompt=content,
        attempt=trajectory.attempt,
        text="" if outcome is None else outcome.answer,
        tokens=0 if last is None else last.sampled,
        stop=None if last is None or trajectory.failure else last.stop,
        failure=trajectory.failure,
    )
