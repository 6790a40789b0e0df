"""Section `task.source`: one record per kind of source."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Natural, Plugin, Section


class Source(Choice):
    """Source of prompts."""

    told_by: ClassVar[tuple[str, ...]] = ("kind", "name")

    kind: str
    """Source type."""


class AdditionSource(Source):
    """Sums of two numbers."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["addition"] = "addition"
    max: Count = 20
    """Largest operand."""


class StringsSource(Source):
    """Strings to reverse, sort or copy."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["reverse", "sort", "copy"] = "reverse"
    length: tuple[Count, Count] = (3, 5)
    """Min and max string length."""
    alphabet: Annotated[str, Field(min_length=2)] = "0123456789"
    """Characters of the strings."""
    count: Count = 2000
    """Number of distinct strings. Unset: at most as many as exist."""

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
    """Number of games."""


class CodeSource(Source):
    """Games whose secret is a string."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["code"] = "code"
    alphabet: Annotated[str, Field(min_length=2)] = "012345"
    """Characters of secrets."""
    length: Annotated[int, Field(ge=1, le=40)] = 4
    """Length of a secret in characters."""
    count: Count = 2000
    """Number of games."""


class LookupSource(Source):
    """Logs (column `document`) that assign digits to letters; the question is the last digit of one letter. For
    environment memory."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["lookup"] = "lookup"
    pairs: Annotated[int, Field(ge=1, le=10_000)] = 52
    """Entries per log, four characters each."""
    keys: Annotated[int, Field(ge=1, le=52)] = 8
    """Number of distinct letters."""
    count: Count = 2000
    """Number of logs."""


class LatestSource(Source):
    """Logs (column `document`) of letters of several kinds; the question is the last letter of one kind. For
    environment memory."""

    kind: Literal["synthetic"] = "synthetic"
    name: Literal["latest"] = "latest"
    length: Annotated[int, Field(ge=1, le=40_000)] = 200
    """Letters per log."""
    kinds: Annotated[int, Field(ge=2, le=26)] = 4
    """Number of kinds of letters."""
    letters: Annotated[int, Field(ge=2, le=26)] = 6
    """Letters per kind; at most 52 in all."""

    @property
    def each(self) -> int:
        """Letters of a kind: what the recipe states, or at most as many as there are."""
        return self.letters if "letters" in self.model_fields_set else min(self.letters, 52 // self.kinds)

    count: Count = 2000
    """Number of logs."""


class Ranking(Section):
    """Conversion of rows with several ranked answers to preference pairs."""

    best: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of answers that count as better, at least one. The rest are worse."""
    pairs: Count = 4
    """Max pairs per row. Worse answers are spread over the ranking."""
    margins: bool = False
    """Use the score difference as the pair's margin."""


class ColumnsSource(Source):
    """Keys that all row-based sources share."""

    columns: dict[
        Literal["id", "prompt", "answer", "messages", "chosen", "rejected", "margin", "answers", "scores", "ranking"],
        str,
    ] = Field(default_factory=dict)
    """Column names for the fields that are named differently in the data."""
    rows: Literal["prompts", "demonstrations", "pairs"] = "prompts"
    """Content of a row: a prompt, a prompt with the answer to imitate, or a prompt with a better and a worse answer.
    Unset: as the algorithm needs."""
    ranking: Ranking = Ranking()
    """Conversion of ranked answers to pairs."""


class JsonlSource(ColumnsSource):
    """JSON Lines file: one object per line."""

    kind: Literal["jsonl"] = "jsonl"
    path: str
    """Path of the file."""


class HubSource(ColumnsSource):
    """Hugging Face dataset: from the Hub, or a file or folder that `datasets` reads (extra `tasks`)."""

    kind: Literal["hf"] = "hf"
    name: str | None = None
    """Dataset id on the Hub."""
    path: str | None = None
    """Local file or folder instead of `name`."""
    split: Annotated[str, Field(min_length=1)] | None = None
    """Split. Unset: train, or the only one."""
    subset: Annotated[str, Field(min_length=1)] | None = None
    """Configuration of a dataset that has several, e.g. main."""


class GymSource(Source):
    """Task of reasoning-gym (extra `tasks`)."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: Annotated[str, Field(min_length=1)]
    """Task name, e.g. chain_sum."""
    count: Literal["auto"] | Count = "auto"
    """Number of prompts. `auto`: 1000, or as many distinct ones as exist."""
    seed: int = 0
    """Seed of the prompts, independent of the run's seed, so that runs compare on equal prompts."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Task settings, e.g. min_terms and max_terms of chain_sum."""

    @property
    def limit(self) -> int:
        """Max number of prompts."""
        return 1000 if self.count == "auto" else self.count


class VerifiersSource(Source):
    """Verifiers taskset (extra `environments`); environment.kind verifiers runs and scores it."""

    kind: Literal["verifiers"] = "verifiers"
    taskset: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
    """Taskset name: a Python file next to the recipe, a package, or a taskset shipped with verifiers."""
    count: Count = 1000
    """Max number of tasks; some tasksets are endless."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Taskset settings."""


class OwnSource(ColumnsSource):
    """Rows from a Python function of your own."""

    kind: Plugin
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the function."""


class ArcSource(Source):
    """ARC tasks, solved by a program (extra `arc`)."""

    kind: Literal["arc"] = "arc"
    name: Literal["arc-agi-1", "arc-agi-2"] = "arc-agi-1"
    """Task set."""
    split: Literal["training", "evaluation"] = "training"
    """Half of the task set."""
    path: str | None = None
    """Local tasks: a folder with one JSON file per task, as ARC is published, or one file with many."""
    augment: Natural = 0
    """Number of augmented variants per task: permuted colors, rotations, reflections."""
    seed: int = 0
    """Seed of the variants, independent of the run's seed."""
    longest: Count | None = None
    """Max prompt length in characters. Example pairs are dropped to fit, then tasks."""
