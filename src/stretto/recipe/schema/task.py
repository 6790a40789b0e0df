"""The sections `task` and `environment`: what the model is asked, and what happens between that and the verdict."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Given, Natural, Seconds, Section
from stretto.recipe.schema.sources import AdditionSource, Source

HELD_OUT = 100
"""Max number of prompts that are held out where a recipe does not state it."""


class Holdout(Section):
    """Prompts kept for evaluation, chosen by id."""

    prompts: Literal["auto"] | Natural = "auto"
    """How many; never drawn for training. `auto`: 100, but at most a tenth of the prompts and at least 1; and at least
    the number in evaluate.prompts."""
    seed: int = 0
    """Which ones; apart from the run's seed, so that runs compare on the same prompts."""

    def number(self, count: int, *, least: int = 1) -> int:
        """How many of `count` prompts are held out; of an open number at least `least`, while one prompt trains."""
        if self.prompts != "auto":
            return self.prompts
        return max(least if least > 1 else min(1, count - 1), min(HELD_OUT, count // 10))


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

    @property
    def processes(self) -> int:
        """How many processes of its own it has."""
        return 0 if self.hosts == "auto" else self.hosts


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
    """What the right guess would be told; with it the game is over, so the model never reads it."""
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
    shown: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """The share of prompts for which the warm-up of a scratch model shows how a memory is kept; for the others it is
    shown to stay empty, so that keeping one remains to be learned."""


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
