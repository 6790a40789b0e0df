"""Tasks that need no data: addition, and reversing, sorting or copying strings; `secrets` has those for many turns.

The prompts follow from the recipe alone: the same on every machine, in every process, whatever PYTHONHASHSEED is. More
strings (`count`) extend the set rather than redraw it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count as counting
from itertools import islice, product
from pathlib import Path

from stretto.errors import Problem
from stretto.recipe.schema import AdditionSource, StringsSource, TaskSection
from stretto.tasks import secrets
from stretto.tasks.secrets import MAX_PROMPTS, SECRET, SecretSource
from stretto.tasks.template import LONGEST, chat, fill
from stretto.tasks.template import problems as template_problems
from stretto.types import Prompt

SyntheticSource = AdditionSource | StringsSource | SecretSource

MAX_LENGTH = 1000
"""Longest string."""
ANSWERS: dict[str, Callable[[str], str]] = {
    "reverse": lambda text: text[::-1],
    "sort": lambda text: "".join(sorted(text)),
    "copy": lambda text: text,
}
"""The answer of each task on strings."""
TEMPLATES = {
    "addition": "What is {a}+{b}? Answer with just the number.",
    "reverse": "Write {text} backwards. Answer with just the result.",
    "sort": "Sort the characters of {text}. Answer with just the result.",
    "copy": "Repeat {text}. Answer with just the result.",
    **secrets.TEMPLATES,
}
"""The default message of each task."""
COLUMNS = {"addition": ("a", "b"), "reverse": ("text",), "sort": ("text",), "copy": ("text",), **secrets.COLUMNS}
"""What a template can name."""


def read(
    task: TaskSection, source: SyntheticSource, root: Path, limit: int | None
) -> tuple[list[Prompt], list[Problem]]:
    """The prompts, or the first `limit`, or what is wrong with the settings."""
    wrong = list(problems(task, source))
    return ([], wrong) if wrong else (list(islice(prompts(task, source), limit)), [])


def prompts(task: TaskSection, source: SyntheticSource) -> Iterator[Prompt]:
    """The prompts of a task without problems, in a fixed order."""
    name = source.name
    template = TEMPLATES[name] if task.prompt is None else task.prompt
    for id, columns, answer in _rows(source):
        messages = chat(fill(template, columns), task.system)
        yield Prompt(id=f"{name}/{id}", messages=messages, reference=answer, tags=columns)


def problems(task: TaskSection, source: SyntheticSource) -> Iterator[Problem]:
    """What is wrong with the task's settings."""
    yield from _size_problems(source)
    if task.prompt is not None:
        yield from template_problems(task.prompt, COLUMNS[source.name])
        if (length := task.prompt.count("{") * MAX_LENGTH) > LONGEST:
            reason = f"names columns so often that a message may have {length:,} characters"
            yield Problem(field="task.prompt", reason=reason, fix="name each once")


def _size_problems(source: SyntheticSource) -> Iterator[Problem]:
    """Sets of prompts that are too large to hold or cannot exist."""
    if isinstance(source, AdditionSource):
        largest = int(MAX_PROMPTS**0.5) - 1
        if source.max > largest:
            reason = f"has more than {MAX_PROMPTS} pairs of numbers"
            yield Problem(field="task.source.max", reason=reason, fix=f"use at most {largest}")
        return
    if isinstance(source, SECRET):
        yield from secrets.problems(source)
        return
    alphabet, (shortest, longest), wanted = source.alphabet, source.length, source.wanted
    if len(set(alphabet)) < len(alphabet):
        yield Problem(field="task.source.alphabet", reason="names a character twice", fix="name each once")
    elif shortest > longest:
        reason = f"the shortest length, {shortest}, is above the longest, {longest}"
        yield Problem(field="task.source.length", reason=reason, fix=f"write [{longest}, {shortest}]")
    elif longest > MAX_LENGTH:
        reason = f"strings of {longest} characters are too long"
        yield Problem(field="task.source.length", reason=reason, fix=f"use at most {MAX_LENGTH}")
    elif wanted > min(MAX_PROMPTS, possible := source.possible):
        most = min(MAX_PROMPTS, possible)
        reason = f"{wanted} strings are wanted, but there can be only {most} different ones"
        yield Problem(field="task.source.count", reason=reason, fix=f"use at most {most}, or longer strings")


def _rows(source: SyntheticSource) -> Iterator[tuple[str, dict[str, int | str], str]]:
    """(id, columns, answer) of every prompt."""
    if isinstance(source, AdditionSource):
        for a, b in product(range(source.max + 1), repeat=2):
            yield f"{a}+{b}", {"a": a, "b": b}, str(a + b)
    elif isinstance(source, SECRET):
        yield from secrets.rows(source)
    else:
        answer = ANSWERS[source.name]
        for text in _draw(source.alphabet, source.length, source.wanted):
            yield text, {"text": text}, answer(text)


def _draw(alphabet: str, lengths: tuple[int, int], wanted: int) -> Iterator[str]:
    """Different strings, each length as often as the others until a length has no more."""
    left = {length: len(alphabet) ** length for length in range(lengths[0], lengths[1] + 1)}
    seen: set[str] = set()
    for index in counting():
        if len(seen) == wanted:
            return
        numbers = secrets.numbers(f"strings|{index}", lengths[1] + 1)
        length = list(left)[numbers[0] % len(left)]
        text = "".join(alphabet[number % len(alphabet)] for number in numbers[1 : length + 1])
        if text not in seen:
            seen.add(text)
            yield text
            left[length] -= 1
            if left[length] == 0:
                del left[length]
