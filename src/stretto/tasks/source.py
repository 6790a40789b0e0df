"""The door to a task: its prompts, which of them are held out, and in what order a run draws the others.

Everything is keyed by prompt ids, never by positions in a file: shuffling a dataset changes nothing, and adding to it
changes as little as possible. The cursor of `PromptSource` is one number, so a resumed run continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.errors import CheckpointError, Problem, RecipeError
from stretto.recipe.schema import (
    AdditionSource,
    ArcSource,
    CodeSource,
    Example,
    GymSource,
    Holdout,
    HubSource,
    JsonlSource,
    LatestSource,
    LookupSource,
    NumberSource,
    OwnSource,
    Recipe,
    Source,
    StringsSource,
    TaskSection,
    VerifiersSource,
)
from stretto.tasks import arc, hf, jsonl, own, reasoning_gym, synthetic, verifiers
from stretto.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Peek:
    """The beginning of a task: enough for the cheap tier of checks."""

    prompts: tuple[Prompt, ...]
    """The first prompts."""
    problems: tuple[Problem, ...]
    """What is wrong with the settings or with these rows."""
    complete: bool
    """True if there are no other prompts."""


Read = Callable[[TaskSection, Any, Path, int | None], tuple[list[Prompt], list[Problem]]]
"""(task, its source, the recipe's folder, how many rows to look at or none for all) -> the prompts of a source, and
what is wrong with its settings or its rows. Rows are read only where the settings are right."""

READERS: dict[type[Source], Read] = {
    AdditionSource: synthetic.read,
    StringsSource: synthetic.read,
    NumberSource: synthetic.read,
    CodeSource: synthetic.read,
    LookupSource: synthetic.read,
    LatestSource: synthetic.read,
    ArcSource: arc.read,
    JsonlSource: jsonl.read,
    HubSource: hf.read,
    GymSource: reasoning_gym.read,
    OwnSource: own.read,
    VerifiersSource: verifiers.read,
}
"""Kind of source -> what reads it."""


def peek(task: TaskSection, root: Path, rows: int = 5) -> Peek:
    """Looks at the settings and the first rows only. `root` is the recipe's folder. Never raises for bad data."""
    prompts, problems = _read(task, root, rows)
    seen = not isinstance(task.source, GymSource | OwnSource | VerifiersSource)
    complete = len(prompts) < rows and not problems and seen
    return Peek(prompts=tuple(prompts), problems=tuple(problems), complete=complete)


def load_prompts(task: TaskSection, root: Path) -> tuple[Prompt, ...]:
    """All prompts of the task, in the source's order. RecipeError with what is wrong; `root` is the recipe's folder."""
    prompts, problems = _read(task, root, None)
    if problems:
        raise RecipeError(*problems)
    return tuple(prompts)


def places(task: TaskSection, root: Path) -> Mapping[str, str]:
    """Prompt id -> where its row stands, of sources whose rows have a place that one can look up."""
    return jsonl.places(task, task.source, root) if isinstance(task.source, JsonlSource) else {}


def _read(task: TaskSection, root: Path, limit: int | None) -> tuple[list[Prompt], list[Problem]]:
    """All prompts, or about the first `limit`, and what is wrong."""
    prompts, problems = READERS[type(task.source)](task, task.source, root, limit)
    return [_with_examples(prompt, task.examples) for prompt in prompts], problems


def _with_examples(prompt: Prompt, examples: Sequence[Example]) -> Prompt:
    """The prompt with solved examples as turns before it, after what the system says. Its id stays."""
    if not examples:
        return prompt
    turns = [
        {"role": role, "content": text}
        for each in examples
        for role, text in (("user", each.prompt), ("assistant", each.answer))
    ]
    said = prompt.messages
    start = 1 if said[0]["role"] == "system" else 0
    return replace(prompt, messages=(*said[:start], *turns, *said[start:]))


def split_task(recipe: Recipe, prompts: Sequence[Prompt]) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """(to train on, held out) of a recipe. Environments but these two may show more of a prompt than its messages."""
    holdout = recipe.task.holdout.model_copy(update={"prompts": recipe.held_out(len(prompts))})
    return split(prompts, holdout, whole=recipe.environment.kind not in ("single_turn", "tools"))


def split(
    prompts: Sequence[Prompt], holdout: Holdout, *, whole: bool = False
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """(to train on, held out), both in the order of a keyed hash of their ids.

    So the first n held-out prompts are a fair sample too, and a new prompt can only push out the last one held out. A
    question that is held out under one id is not trained on under another, nor is another of its family. With
    `whole`, a question is everything of a prompt but its id: games open with the same words, and a memory's document
    is a column.
    """
    number = holdout.number(len(prompts))
    if number >= len(prompts):
        reason = f"{number} of {len(prompts)} prompts are held out, which leaves none to train on"
        fix = f"use at most {len(prompts) - 1}, or more data"
        raise RecipeError.of("task.holdout.prompts", reason, fix)
    ranked = sorted(prompts, key=lambda prompt: _rank(f"holdout|{holdout.seed}", prompt.id))
    heldout = tuple(ranked[:number])
    asked = {key for prompt in heldout for key in _asked(prompt, whole)}
    training = tuple(prompt for prompt in ranked[number:] if asked.isdisjoint(_asked(prompt, whole)))
    if not training:
        reason = f"all {len(prompts)} prompts ask what the {number} that are held out ask"
        raise RecipeError.of("task.holdout.prompts", reason, "hold out fewer, or use more data")
    return training, heldout


def _asked(prompt: Prompt, whole: bool) -> tuple[str, ...]:
    """What the model is told, whatever the prompt is called, and the family of prompts that it belongs to."""
    parts = [prompt.messages, prompt.reference, prompt.tags] if whole else prompt.messages
    told = json.dumps(parts, sort_keys=True, default=str)
    return (told, f"family {prompt.tags['family']}") if "family" in prompt.tags else (told,)


def _rank(key: str, id: str) -> tuple[bytes, str]:
    """Where an id stands in the order that belongs to a key."""
    return hashlib.blake2b(f"{key}|{id}".encode(), digest_size=8).digest(), id


class PromptSource:
    """Draws prompts for ever: every epoch all of them once, in an order of its own. Stateful."""

    name = "prompts"

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        """The order follows from the seed and the ids; the order of `prompts` does not matter."""
        if not prompts:
            raise ValueError("there are no prompts to draw from")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._drawn = 0
        self.takes_others = False
        self._order: tuple[int, list[Prompt]] = (-1, [])
        ids = hashlib.blake2b(f"{seed}|".encode(), digest_size=16)
        for id in sorted(prompt.id for prompt in prompts):
            ids.update(f"{len(id)}|{id}".encode())
        self._fingerprint = ids.hexdigest()

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them, in no particular order."""
        return self._prompts

    def take(self, n: int) -> list[tuple[Prompt, int]]:
        """The next n prompts, each with the number of times it was drawn before in this run."""
        drawn = []
        for index in range(self._drawn, self._drawn + n):
            epoch, place = divmod(index, len(self._prompts))
            drawn.append((self._epoch(epoch)[place], epoch))
        self._drawn += len(drawn)
        return drawn

    def state(self) -> Mapping[str, Any]:
        """How many were drawn, and from what."""
        return {"drawn": self._drawn, "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. CheckpointError if it belongs to other prompts or another seed.

        Other prompts that are accepted (`takes_others`) are drawn from the same place of their own order.
        """
        if state.get("fingerprint") != self._fingerprint and not self.takes_others:
            raise CheckpointError(
                "the checkpoint was written with other prompts or another seed; restore the data and the recipe it "
                "was made with, or pass --allow task.source to go on with the prompts that there are now"
            )
        drawn = state.get("drawn")
        if not isinstance(drawn, int) or drawn < 0:
            raise CheckpointError(f"the checkpoint's prompt cursor is {drawn!r}, which is not a count")
        self._drawn = drawn

    def _epoch(self, epoch: int) -> list[Prompt]:
        """The order of one epoch; only the current one is kept."""
        if self._order[0] != epoch:
            key = f"order|{self._seed}|{epoch}"
            self._order = (epoch, sorted(self._prompts, key=lambda prompt: _rank(key, prompt.id)))
        return self._order[1]
