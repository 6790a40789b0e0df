"""The section `task.source`: where prompts come from, a record a kind."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Natural, Plugin, Section


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
    """How many different strings. Unset, no more than there are."""

    @property
    def possible(self) -> int:
        """Number of different strings that there are; a number above `count` stands for any larger one."""
        found = 0
        for length in range(self.length[0], self.length[1] + 1):
            found += len(self.alphabet) ** min(length, 64)
            if found > self.count:
                break
        return found

    @property
    def wanted(self) -> int:
        """Number of strings: what the recipe states, or at most as many as there are."""
        return self.count if "count" in self.model_fields_set else max(1, min(self.count, self.possible))


class NumberSource(Source):
    """Games whose secret is a number."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["number"] = "number"
    range: tuple[int, int] = (0, 99)
    """Smallest and largest secret."""
    count: Count = 2000
    """How many games."""


class CodeSource(Source):
    """Games whose secret is a string."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["code"] = "code"
    alphabet: Annotated[str, Field(min_length=2)] = "012345"
    """What secrets are made of."""
    length: Annotated[int, Field(ge=1, le=40)] = 4
    """Characters of a secret."""
    count: Count = 2000
    """How many games."""


class LookupSource(Source):
    """A log, in the column `document`, in which letters are given digits; the last digit of one of them is asked. For
    environment memory."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["lookup"] = "lookup"
    pairs: Annotated[int, Field(ge=1, le=10_000)] = 52
    """Entries of the log, four characters each."""
    keys: Annotated[int, Field(ge=1, le=52)] = 8
    """How many letters there are."""
    count: Count = 2000
    """How many logs."""


class LatestSource(Source):
    """A log, in the column `document`, of letters of several kinds; the last letter of one of them is asked, and it may
    stand anywhere. For environment memory."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["latest"] = "latest"
    length: Annotated[int, Field(ge=1, le=40_000)] = 200
    """Letters of the log."""
    kinds: Annotated[int, Field(ge=2, le=26)] = 4
    """How many kinds of letters there are."""
    letters: Annotated[int, Field(ge=2, le=26)] = 6
    """How many letters are of each kind; 52 in all at most. Unset, no more than there are for `kinds`."""

    @property
    def each(self) -> int:
        """Letters of a kind: what the recipe states, or at most as many as there are."""
        return self.letters if "letters" in self.model_fields_set else min(self.letters, 52 // self.kinds)

    count: Count = 2000
    """How many logs."""


class Ranking(Section):
    """How a row with several answers, of which some are better, becomes pairs."""

    best: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of the answers, at least one, that are the better ones; the others are the worse ones."""
    pairs: Count = 4
    """Pairs of a row at most; the worse answers are taken from all over the ranking."""
    margins: bool = False
    """The difference of two scores is their pair's margin."""


class ColumnsSource(Source):
    """What sources of rows share."""

    columns: dict[
        Literal["id", "prompt", "answer", "messages", "chosen", "rejected", "margin", "answers", "scores", "ranking"],
        str,
    ] = Field(default_factory=dict)
    """Which column holds what, where it is not called so."""
    rows: Literal["prompts", "demonstrations", "pairs"] = "prompts"
    """What a row is: a question, one with the answer to imitate, or one with a better and a worse answer; left out,
    what the algorithm learns from."""
    ranking: Ranking = Ranking()
    """Pairs: rows with several answers."""


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
    count: Literal["auto"] | Count = "auto"
    """How many prompts. `auto`: 1000, or as many different ones as there are."""
    seed: int = 0
    """Which prompts; apart from the run's seed, so that runs compare on the same ones."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings, such as min_terms and max_terms of chain_sum."""

    @property
    def limit(self) -> int:
        """Max number of prompts."""
        return 1000 if self.count == "auto" else self.count


class VerifiersSource(Source):
    """Tasks of a taskset of verifiers (the extra environments); `environment.kind: verifiers` plays and judges them."""

    kind: Literal["verifiers"] = "verifiers"
    taskset: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
    """Its name: a Python file beside the recipe, a package, or one of verifiers' own."""
    count: Count = 1000
    """How many of its tasks at most; some tasksets never end."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The taskset's own settings."""


class OwnSource(ColumnsSource):
    """Rows from a Python function of yours, called with `config`."""

    kind: Plugin
    config: dict[str, Any] = Field(default_factory=dict)
    """What the function is called with."""


class ArcSource(Source):
    """Tasks of ARC, to be solved by a program (the extra arc)."""

    kind: Literal["arc"] = "arc"
    name: Literal["arc-agi-1", "arc-agi-2"] = "arc-agi-1"
    """The set of tasks."""
    split: Literal["training", "evaluation"] = "training"
    """Which half of the set."""
    path: str | None = None
    """Tasks on this machine instead: a folder with one JSON file each, as ARC is published, or one file with many."""
    augment: Natural = 0
    """Variants of every task besides itself: other colours, turned and mirrored."""
    seed: int = 0
    """Which variants; apart from the run's seed, so that runs compare on the same ones."""
    longest: Count | None = None
    """Characters of a prompt, which are more than its tokens: pairs are left out to fit, then tasks."""
