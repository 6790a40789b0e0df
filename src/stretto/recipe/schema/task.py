"""The sections `task` and `environment`: what the model is asked, and what happens between that and the verdict."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Given, Natural, Plugin, Seconds, Section


class Source(Choice):
    """Where prompts come from."""

    told_by: ClassVar[tuple[str, ...]] = ("kind", "name")

    kind: str
    """What prompts are made of."""


class AdditionSource(Source):
    """Sums of two numbers."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["addition"] = "addition"
    max: Count = 20
    """The largest operand."""


class StringsSource(Source):
    """Strings to be reversed, sorted or copied."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["reverse", "sort", "copy"] = "reverse"
    length: tuple[Count, Count] = (3, 5)
    """Shortest and longest string."""
    alphabet: Annotated[str, Field(min_length=2)] = "0123456789"
    """The characters of the strings."""
    count: Count = 2000
    """How many different strings."""


class ColumnsSource(Source):
    """What sources of rows share."""

    columns: dict[Literal["id", "prompt", "answer", "messages"], str] = Field(default_factory=dict)
    """Which column holds what, where it is not called so."""


class JsonlSource(ColumnsSource):
    """A file with one JSON object per line."""

    kind: Literal["jsonl"] = "jsonl"
    path: str
    """The file."""


class HubSource(ColumnsSource):
    """A dataset of the Hugging Face hub, or a file or folder that `datasets` reads (the extra tasks)."""

    kind: Literal["hf"] = "hf"
    name: str | None = None
    """A dataset of the hub."""
    path: str | None = None
    """A file or folder on this machine instead."""
    split: Annotated[str, Field(min_length=1)] | None = None
    """Which split; default train, or the only one."""
    subset: Annotated[str, Field(min_length=1)] | None = None
    """Which configuration of a dataset that has several, such as main."""


class GymSource(Source):
    """A task of reasoning-gym (the extra tasks)."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: Annotated[str, Field(min_length=1)]
    """The task, such as chain_sum."""
    count: Count = 1000
    """How many prompts."""
    seed: int = 0
    """Which prompts; apart from the run's seed, so that runs compare on the same ones."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings, such as min_terms and max_terms of chain_sum."""


class OwnSource(ColumnsSource):
    """Rows from a Python function of yours, called with `config`."""

    kind: Plugin
    config: dict[str, Any] = Field(default_factory=dict)
    """What the function is called with."""


class ArcSource(Source):
    """Tasks of ARC."""

    available = False

    kind: Literal["arc"] = "arc"
    name: str | None = None
    """The set of tasks."""
    path: str | None = None
    """A folder of tasks on this machine."""


class Holdout(Section):
    """Prompts kept for evaluation, chosen by id."""

    prompts: Natural = 100
    """How many; never drawn for training."""
    seed: int = 0
    """Which ones; apart from the run's seed, so that runs compare on the same prompts."""


class TaskSection(Section):
    """What the model is asked."""

    source: Source = AdditionSource()
    """Where prompts come from."""
    prompt: str | None = None
    """Template of the user's message over the columns of the source; default: the task's own."""
    system: str | None = None
    """A system message before it."""
    holdout: Holdout = Holdout()
    """Prompts kept for evaluation."""


class EnvironmentSection(Choice):
    """What happens between the prompt and the verdict."""

    kind: str
    """Who talks to the model."""
    deadline: Seconds = 60.0
    """Seconds one trajectory may spend outside the engine."""


class SingleTurnSection(EnvironmentSection):
    """One question, one answer."""

    kind: Literal["single_turn"] = "single_turn"


class OwnEnvironmentSection(EnvironmentSection):
    """An async function or a class of yours."""

    kind: Given
    hosts: Literal["auto"] | Natural = "auto"
    """How many processes of its own it runs in; 0: in the process of the run, and so does auto."""


class ToolsSection(EnvironmentSection):
    """A model that calls tools."""

    available = False

    kind: Literal["tools"] = "tools"


class GameSection(EnvironmentSection):
    """A game of many turns."""

    available = False

    kind: Literal["game"] = "game"


class MemorySection(EnvironmentSection):
    """A model that reads a long text piece by piece and keeps a memory."""

    available = False

    kind: Literal["memory"] = "memory"
