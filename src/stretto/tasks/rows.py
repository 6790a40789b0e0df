"""From somebody's rows to prompts: the loop that every source of rows shares.

A row that is not like the first one is reported with where it stands, several at once, and nothing of it reaches the
run. What a row looks like is `columns`; where rows come from is `jsonl` and `hf`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from stretto.errors import Problem
from stretto.recipe.schema import ColumnsSource, TaskSection
from stretto.tasks.columns import Columns, Row, RowError
from stretto.tasks.examples import RowReader, reader_of
from stretto.tasks.template import printable
from stretto.types import Prompt

MAX_PROBLEMS = 10
"""Bad rows that are reported at once."""

Raw = TypeVar("Raw")


def problems(task: TaskSection, source: ColumnsSource) -> Iterator[Problem]:
    """What is wrong with the settings that say which column is what."""
    named = source.columns
    for key in ("prompt", "messages"):
        if task.prompt is not None and key in named:
            reason = "has no effect, because task.prompt makes the message"
            yield Problem(field=f"task.source.columns.{key}", reason=reason, fix="remove one of the two")
    if {"prompt", "messages"} <= named.keys():
        reason = "a row has either a message or a whole chat, not both"
        yield Problem(field="task.source.columns", reason=reason, fix="remove prompt or messages")


def find(given: str, root: Path, what: str, there: Callable[[Path], bool]) -> Path | Problem:
    """The path as it is if absolute, else beside the recipe (`root`), else in the working directory."""
    path = os.path.expanduser(given)
    places = [root / path, Path.cwd() / path]
    for place in places:
        if there(place):
            return place
    reason = f"there is no {what} {' or '.join(dict.fromkeys(str(place) for place in places))}"
    return Problem(field="task.source.path", reason=reason, fix="correct the path; it is relative to the recipe")


def gather(
    task: TaskSection,
    source: ColumnsSource,
    rows: Iterable[tuple[int, Raw]],
    parse: Callable[[Raw], Row],
    *,
    where: str,
    unit: str,
    places: dict[str, str] | None = None,
) -> tuple[list[Prompt], list[Problem]]:
    """The prompts of numbered rows, and what is wrong with these.

    `parse` makes a row of what is there, or raises a RowError. `where` names the source and `unit` what it is made of.
    `places` is told where the row of each prompt stands.
    """
    prompts: dict[str, Prompt] = {}
    numbers: dict[str, int] = {}
    found: list[Problem] = []
    reader: RowReader | None = None
    for number, raw in rows:
        try:
            row = parse(raw)
            reader = reader or reader_of(task, source, row)
            for prompt in reader.prompts(row):
                _refuse_repetition(prompt, reader.columns, numbers, unit)
                prompts[prompt.id] = prompt
                numbers[prompt.id] = number
        except RowError as error:
            found.append(_problem(error, f"{where}:{number}"))
            if error.field is not None or len(found) == MAX_PROBLEMS:
                break
    if places is not None:
        places.update({id: f"{where}:{number}" for id, number in numbers.items()})
    return list(prompts.values()), found


def _problem(error: RowError, place: str) -> Problem:
    """Names the row, or the recipe key if that is what has to change."""
    if error.field is None:
        return Problem(field=place, reason=error.reason, fix=error.fix)
    return Problem(field=error.field, reason=f"{error.reason} in {place}", fix=error.fix)


def _refuse_repetition(prompt: Prompt, columns: Columns, numbers: Mapping[str, int], unit: str) -> None:
    """Ids name prompts for ever, so no two rows may share one."""
    if prompt.id not in numbers:
        return
    before = f"{unit} {numbers[prompt.id]}"
    if columns.id is None:
        raise RowError(f"the row is the same as on {before}", "remove it, or give the rows an id")
    raise RowError(f"the id {printable(prompt.id)!r} is that of {before} already", "give every row its own id")
