"""What a rule gets and gives: a recipe and its surroundings in, problems out.

A rule never raises, never stops another, and reads only what it is handed, so rules can be run in any order and all
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import Problem
from stretto.recipe.schema import Recipe, RewardPart, TaskSection
from stretto.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """What rules ask of rooms that `checks.rules` must not import; the command line hands them in."""

    task: Callable[[TaskSection, Path, int], tuple[Sequence[Prompt], Sequence[Problem], bool]]
    """The first prompts of a task (about so many), what is wrong with it, and whether these are all that there are;
    files are looked for in the folder."""
    rewards: Callable[[Sequence[RewardPart], Path], Iterable[Problem]]
    """What is wrong with the parts of the reward, each for itself; user code is looked for in the folder."""
    plan: Callable[[Recipe, Path], Iterable[Problem]]
    """What is wrong with where the models are to live; their files are looked for in the folder."""
    numbers: Callable[[str], Iterable[str]]
    """The numbers in a reference answer, as a numeric reward reads them."""
    tests: Callable[[Prompt, str], str | None]
    """Why a prompt has no tests for a program in this column, or none."""
    shape: Callable[[Recipe, Path], Iterable[Problem]]
    """A contradiction between `model.shape` and the files of the model, where these are on this machine."""
    table: Callable[[Recipe, Path], Iterable[Problem]]
    """What is wrong with the table of V* that training would read."""
    functions: frozenset[str] = frozenset()
    """Kinds that stand for functions which were given as objects, so that nobody has to find them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """What surrounds a recipe."""

    root: Path
    """The recipe's folder, where its data, models and user code are looked for."""
    probes: Lookups
    """Questions for other rooms."""
    prompts: tuple[Prompt, ...]
    """The first prompts of the task; none where they cannot be read, which is a problem of its own."""
    complete: bool
    """True if these are all prompts that there are."""
    planning: bool = False
    """True if nothing is to be run, so that what can only be priced is allowed, and no prompts were read."""
    training: bool = True
    """False if a model is only asked, so that what a training alone reads or writes need not be there."""


Rule = Callable[[Recipe, CheckContext], Iterable[Problem]]

DEFAULTS = Recipe()
"""What a recipe is that says nothing."""


def value_of(recipe: Recipe, name: str) -> Any:
    """The value at a dotted name of plain sections, or none below a section that is null."""
    value: Any = recipe
    for key in name.split("."):
        value = getattr(value, key, None)
    return value


def is_default(recipe: Recipe, name: str) -> bool:
    """True if the value is what leaving the key out would have given."""
    return bool(value_of(recipe, name) == value_of(DEFAULTS, name))
