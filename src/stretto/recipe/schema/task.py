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


class Holdout(Section):
    """Prompts kept for evaluation, chosen by id."""

    prompts: Natural = 100
    """How many; never drawn for training."""
    seed: int = 0
    """Which ones; apart from the run's seed, so that runs compare on the same prompts."""


class Example(Section):
    """A question with its answer, shown to the model before each prompt."""

    prompt: Annotated[str, Field(min_length=1)]
    """What the user says."""
    answer: Annotated[str, Field(min_length=1)]
    """What the assistant answers."""


class TaskSection(Section):
    """What the model is asked."""

    source: Source = AdditionSource()
    """Where prompts come from."""
    prompt: str | None = None
    """Template of the user's message over the columns of the source; default: the task's own."""
    system: str | None = None
    """A system message before it."""
    examples: tuple[Example, ...] = ()
    """Turns between the system message and the prompt, for few-shot prompting."""
    template: dict[str, Any] = Field(default_factory=dict)
    """What the model's chat template is told besides the messages, such as {enable_thinking: false}."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """A file with a chat template (Jinja) instead of the model's own; it is saved with the model."""
    drop_longer_than: Literal["auto"] | Count | None = None
    """Prompts of more tokens than this are dropped and counted; auto: those that leave no room in the context for
    engine.max_new_tokens."""
    holdout: Holdout = Holdout()
    """Prompts kept for evaluation."""


class EnvironmentSection(Choice):
    """What happens between the prompt and the verdict. Of games the `game` decides which keys there are."""

    told_by: ClassVar[tuple[str, ...]] = ("kind", "game")

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
    turns: Count = 8
    """A class of tools: most replies of the model."""


class ProgramSection(EnvironmentSection):
    """A program of yours that knows OpenAI's API, started once per trajectory (the extra serve)."""

    kind: Literal["program"] = "program"
    command: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """The program and its arguments, started in the recipe's folder without a shell: [python, agent.py]."""


class VerifiersSection(EnvironmentSection):
    """Whatever plays the tasks of `task.source.kind: verifiers`: a question, a game (the extra environments)."""

    kind: Literal["verifiers"] = "verifiers"
    turns: Count | None = None
    """Most replies of the model; default: as the taskset says."""


class ToolsSection(EnvironmentSection):
    """A model that calls tools."""

    kind: Literal["tools"] = "tools"
    tools: Annotated[tuple[Literal["calculator", "search", "python"], ...], Field(min_length=1)] = ("calculator",)
    """Which tools; python runs programs in the sandbox."""
    turns: Count = 8
    """Most replies of the model."""
    corpus: str | None = None
    """search: a folder of .txt and .md files, or a .jsonl file with a `text` per line."""
    results: Count = 3
    """search: passages of one answer."""


class GameSection(EnvironmentSection):
    """What games of deduction share; the secret is the prompt's answer."""

    turns: Count = 8
    """Most guesses."""
    right: str = "right"
    """What the right guess is told."""
    invalid: str = "That is no guess."
    """What a reply without a guess is told."""


class NumberGame(GameSection):
    """A whole number is guessed, and each guess is told whether the secret is higher or lower."""

    kind: Literal["game"] = "game"
    game: Literal["number"] = "number"
    range: tuple[int, int] = (0, 99)
    """Smallest and largest secret."""
    higher: str = "higher"
    """What a guess is told that is too small."""
    lower: str = "lower"
    """What a guess is told that is too large."""


class CodeGame(GameSection):
    """A string is guessed, and each guess is told how many characters are right, and how many elsewhere."""

    kind: Literal["game"] = "game"
    game: Literal["code"] = "code"
    alphabet: Annotated[str, Field(min_length=2)] = "012345"
    """What secrets are made of."""
    length: Annotated[int, Field(ge=1, le=40)] = 4
    """Characters of a secret."""
    matched: str = "{placed} right, {misplaced} misplaced"
    """What another guess is told."""


class MemorySection(EnvironmentSection):
    """A model that reads a long text piece by piece and keeps a memory."""

    kind: Literal["memory"] = "memory"
    document: str = "document"
    """The column that holds the text."""
    chunk: Count = 8000
    """Characters of a piece, which ends behind a space if one is near."""
    memory_tokens: Count | None = None
    """Longest memory; default: engine.max_new_tokens."""
    empty: str = "No memory yet."
    """The memory before the first piece."""
    update: str = (
        "A question is to be answered from a long text, of which you read one section at a time.\n\n"
        "Question: {question}\n\nYour memory of the sections before:\n{memory}\n\nThis section:\n{chunk}\n\n"
        "Write the new memory: everything of the old one and of this section that helps to answer the question. "
        "Only what you write now is kept."
    )
    """Template of the message for each piece, over {question}, {memory} and {chunk}."""
    answer: str = (
        "Question: {question}\n\nYour memory of a long text that you have read:\n{memory}\n\nAnswer the question."
    )
    """Template of the last message, over {question} and {memory}."""
    keep: bool = True
    """False: each piece finds the memory empty, a control for what memory is worth."""


class ProjectSection(EnvironmentSection):
    """A program of several files, each written in a conversation of its own that leaves notes for the next."""

    kind: Literal["project"] = "project"
    files: str = "files"
    """The column that lists the files: [{"name": "parse.py", "task": "what it is to be"}, ...], the program last."""
    empty: str = "No notes yet."
    """The notes before the first file."""
    write: str = (
        "A program is written file by file, each by somebody who sees only the notes of those before.\n\n"
        "Goal: {goal}\n\nNotes:\n{notes}\n\nNow write {name}: {file}\n\n"
        "Answer with the file in a ```python block and, behind it, the new notes: everything of the old ones and of "
        "this file that the later files need, such as how its functions are called."
    )
    """Template of the message for each file, over {goal}, {notes}, {name} and {file}."""
