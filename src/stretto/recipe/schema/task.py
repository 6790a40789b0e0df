"""Sections `task` and `environment`: prompts, and the interaction between prompt and reward."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Given, Natural, Seconds, Section
from stretto.recipe.schema.sources import AdditionSource, Source

HELD_OUT = 100
"""Max number of prompts that are held out where a recipe does not state it."""


class Holdout(Section):
    """Prompts reserved for evaluation, selected by id."""

    prompts: Literal["auto"] | Natural = "auto"
    """Number of held-out prompts, never used for training. `auto`: `evaluate.prompts` if set, else 100, but at most a
    tenth of the prompts."""
    seed: int = 0
    """Seed of the selection, independent of the run's seed, so that runs compare on equal prompts."""

    def number(self, count: int) -> int:
        """Return the number of held-out prompts among `count`."""
        if self.prompts != "auto":
            return self.prompts
        return max(min(1, count - 1), min(HELD_OUT, count // 10))


class Example(Section):
    """Few-shot example, inserted before each prompt."""

    prompt: Annotated[str, Field(min_length=1)]
    """User message."""
    answer: Annotated[str, Field(min_length=1)]
    """Assistant message."""


class TaskSection(Section):
    """Prompts of training and evaluation."""

    source: Source = AdditionSource()
    """Source of prompts."""
    prompt: str | None = None
    """Template of the user message over columns of the source. Unset: the source's own."""
    system: str | None = None
    """System message."""
    examples: tuple[Example, ...] = ()
    """Few-shot examples between system message and prompt."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the chat template, e.g. {enable_thinking: false}."""
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """File with a Jinja chat template that replaces the model's. Saved with the model."""
    drop_longer_than: Literal["auto"] | Count | None = None
    """Max prompt length in tokens; longer prompts are dropped and counted. auto: the context minus
    engine.max_new_tokens."""
    holdout: Holdout = Holdout()
    """Prompts reserved for evaluation."""


class EnvironmentSection(Choice):
    """Interaction between the prompt and the reward. For games, `game` selects the keys."""

    told_by: ClassVar[tuple[str, ...]] = ("kind", "game")

    kind: str
    """Environment type."""
    deadline: Seconds = 60.0
    """Max seconds that one trajectory spends outside the engine."""


class SingleTurnSection(EnvironmentSection):
    """One prompt, one completion."""

    kind: Literal["single_turn"] = "single_turn"


class OwnEnvironmentSection(EnvironmentSection):
    """Environment of your own: an async function or a class."""

    kind: Given
    hosts: Literal["auto"] | Natural = "auto"
    """Number of separate processes for the environment. 0 or auto: the run's process."""
    turns: Count = 8
    """Tool classes: max number of model turns."""

    @property
    def processes(self) -> int:
        """Number of separate processes for the environment. 0 or auto: the run's process."""
        return 0 if self.hosts == "auto" else self.hosts


class ProgramSection(EnvironmentSection):
    """Program that calls the OpenAI API, started once per trajectory (extra `serve`)."""

    kind: Literal["program"] = "program"
    command: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """Program and arguments, run without a shell in the recipe's folder, e.g. [python, agent.py]."""


class VerifiersSection(EnvironmentSection):
    """Environment of a verifiers taskset, from task.source.kind verifiers (extra `environments`)."""

    kind: Literal["verifiers"] = "verifiers"
    turns: Count | None = None
    """Max number of model turns. Unset: the taskset's limit."""


class ToolsSection(EnvironmentSection):
    """Model with tools."""

    kind: Literal["tools"] = "tools"
    tools: Annotated[tuple[Literal["calculator", "search", "python"], ...], Field(min_length=1)] = ("calculator",)
    """Available tools. `python` runs programs in the sandbox."""
    turns: Count = 8
    """Max number of model turns."""
    corpus: str | None = None
    """Tool search: folder of .txt and .md files, or a .jsonl file with a `text` column."""
    results: Count = 3
    """Tool search: passages per result."""


class GameSection(EnvironmentSection):
    """Keys that all games share. The secret is the prompt's reference answer."""

    turns: Count = 8
    """Max number of guesses."""
    right: str = "right"
    """Reply to a correct guess. The game ends with it, so the model never reads it."""
    invalid: str = "That is no guess."
    """Reply to a completion without a guess."""


class NumberGame(GameSection):
    """Guess a whole number; each reply is higher or lower."""

    kind: Literal["game"] = "game"
    game: Literal["number"] = "number"
    range: tuple[int, int] = (0, 99)
    """Smallest and largest secret."""
    higher: str = "higher"
    """Reply to a guess that is too small."""
    lower: str = "lower"
    """Reply to a guess that is too large."""


class CodeGame(GameSection):
    """Guess a string; each reply counts right and misplaced characters."""

    kind: Literal["game"] = "game"
    game: Literal["code"] = "code"
    alphabet: Annotated[str, Field(min_length=2)] = "012345"
    """Characters of secrets."""
    length: Annotated[int, Field(ge=1, le=40)] = 4
    """Length of a secret in characters."""
    matched: str = "{placed} right, {misplaced} misplaced"
    """Reply to a wrong guess."""


class MemorySection(EnvironmentSection):
    """Memory agent: reads a long text in chunks and maintains a memory."""

    kind: Literal["memory"] = "memory"
    document: str = "document"
    """Column with the text."""
    chunk: Count = 8000
    """Max chunk length in characters. A chunk ends after a space where possible."""
    memory_tokens: Count | None = None
    """Max memory length in tokens. Unset: engine.max_new_tokens."""
    empty: str = "No memory yet."
    """Initial memory."""
    update: str = (
        "A question is to be answered from a long text, of which you read one section at a time.\n\n"
        "Question: {question}\n\nYour memory of the sections before:\n{memory}\n\nThis section:\n{chunk}\n\n"
        "Write the new memory: everything of the old one and of this section that helps to answer the question. "
        "Only what you write now is kept."
    )
    """Message template for each chunk, over {question}, {memory} and {chunk}."""
    answer: str = (
        "Question: {question}\n\nYour memory of a long text that you have read:\n{memory}\n\nAnswer the question."
    )
    """Message template for the final question, over {question} and {memory}."""
    keep: bool = True
    """Pass the memory to the next chunk. False resets it each time, as a control experiment."""
    shown: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Scratch models: share of warm-up demonstrations that keep a memory. The rest show an empty memory, so that RL
    has something to learn."""


class ProjectSection(EnvironmentSection):
    """Program of several files, each written in a separate conversation that receives notes of the previous ones."""

    kind: Literal["project"] = "project"
    files: str = "files"
    """Column with the list of files: [{"name": "parse.py", "task": "..."}, ...], the main program last."""
    empty: str = "No notes yet."
    """Initial notes."""
    write: str = (
        "A program is written file by file, each by an author who sees only the notes of the files before.\n\n"
        "Goal: {goal}\n\nNotes:\n{notes}\n\nNow write {name}: {file}\n\n"
        "Answer with the file in a ```python block and, behind it, the new notes: everything of the old ones and of "
        "this file that the later files need, such as how its functions are called."
    )
    """Message template for each file, over {goal}, {notes}, {name} and {file}."""
