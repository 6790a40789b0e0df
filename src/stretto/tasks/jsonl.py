"""Prompts from a file with one JSON object per line.

The file may come from anywhere: a line that is not UTF-8, not JSON, not an object or not like the first one is reported
with its number, several at once, and nothing of it reaches the run. Blank lines are skipped.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from stretto.config.schema import Task
from stretto.errors import Problem
from stretto.tasks.columns import Columns, Row, RowError
from stretto.tasks.template import printable
from stretto.types import Prompt

MAX_PROBLEMS = 10
"""Bad lines that are reported at once."""
OBJECT = "write one JSON object per line"


def problems(task: Task) -> Iterator[Problem]:
    """What is wrong with the task's settings, without reading the file."""
    source = task.source
    for key in ("max", "length", "alphabet", "count"):
        if getattr(source, key) is not None:
            yield Problem(field=f"task.source.{key}", reason="has no effect on a jsonl source", fix="remove it")
    if source.name not in (None, "addition"):
        fix = "remove it; task.source.path names the file"
        yield Problem(field="task.source.name", reason="has no effect on a jsonl source", fix=fix)
    for key in ("prompt", "messages"):
        if task.prompt is not None and key in source.columns:
            reason = "has no effect, because task.prompt makes the message"
            yield Problem(field=f"task.source.columns.{key}", reason=reason, fix="remove one of the two")
    if {"prompt", "messages"} <= source.columns.keys():
        reason = "a row has either a message or a whole chat, not both"
        yield Problem(field="task.source.columns", reason=reason, fix="remove prompt or messages")


def locate(task: Task, root: Path) -> Path | Problem:
    """The file: as it is if absolute, else beside the recipe (`root`), else in the working directory."""
    if task.source.path is None:
        return Problem(field="task.source.path", reason="a jsonl source needs a file", fix="set task.source.path")
    path = os.path.expanduser(task.source.path)
    places = [root / path, Path.cwd() / path]
    for place in places:
        if os.path.isfile(place):
            return place
    reason = f"there is no file {' or '.join(dict.fromkeys(str(place) for place in places))}"
    return Problem(field="task.source.path", reason=reason, fix="correct the path; it is relative to the recipe")


def read(task: Task, path: Path, limit: int | None = None) -> tuple[list[Prompt], list[Problem]]:
    """The prompts of the file, or of its first `limit` rows, and what is wrong with it."""
    prompts: dict[str, Prompt] = {}
    lines: dict[str, int] = {}
    found: list[Problem] = []
    columns: Columns | None = None
    try:
        for number, line in islice(_lines(path), limit):
            try:
                row = _row(line)
                columns = columns or Columns.of(task, row)
                prompt = columns.read(row)
                _refuse_repetition(prompt, columns, lines)
                prompts[prompt.id] = prompt
                lines[prompt.id] = number
            except RowError as error:
                found.append(_problem(error, path, number))
                if error.field is not None or len(found) == MAX_PROBLEMS:
                    break
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        found.append(Problem(field=str(path), reason=reason, fix="make it readable"))
    if not prompts and not found:
        found.append(Problem(field=str(path), reason="the file holds no rows", fix=OBJECT))
    return list(prompts.values()), found


def _problem(error: RowError, path: Path, number: int) -> Problem:
    """Names the line, or the recipe key if that is what has to change."""
    if error.field is None:
        return Problem(field=f"{path}:{number}", reason=error.reason, fix=error.fix)
    return Problem(field=error.field, reason=f"{error.reason} in {path}:{number}", fix=error.fix)


def _refuse_repetition(prompt: Prompt, columns: Columns, lines: Mapping[str, int]) -> None:
    """Ids name prompts for ever, so no two rows may share one."""
    if prompt.id not in lines:
        return
    if columns.id is None:
        raise RowError(f"the row is the same as on line {lines[prompt.id]}", "remove it, or give the rows an id")
    reason = f"the id {printable(prompt.id)!r} is that of line {lines[prompt.id]} already"
    raise RowError(reason, "give every row its own id")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line that is not blank, with its number."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                yield number, content


def _row(line: bytes) -> Row:
    """One line as an object. RowError if it is none."""
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse)
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeDecodeError:
        raise RowError("the line is not UTF-8", "save the file as UTF-8") from None
    except UnicodeEncodeError:
        raise RowError("the line holds half of a surrogate pair, which is no character", "remove the escape") from None
    except json.JSONDecodeError as error:
        raise RowError(f"the line is not JSON: {error.msg} at column {error.colno}", OBJECT) from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"the line is not JSON that can be read: {error}", OBJECT) from None
    if not isinstance(row, dict):
        raise RowError("the line is JSON, but not an object", OBJECT)
    return row


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")
