"""Prompts from a function of the user's: `def rows(config)` gives rows as dicts, or `Prompt`s.

`config` is the recipe's `task.source.config`. The function is run in this process, when prompts are loaded; plain
checks only look at its file. What its rows hold is checked like the rows of a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stretto import plugins
from stretto.errors import Problem, RecipeError
from stretto.recipe.schema import OwnSource, TaskSection
from stretto.tasks.columns import Row, RowError
from stretto.tasks.rows import gather, problems
from stretto.types import Prompt

FIELD = "task.source.kind"
PLAIN = "give rows as dicts of plain values, or stretto.types.Prompt"


def read(task: TaskSection, source: OwnSource, root: Path, limit: int | None) -> tuple[list[Prompt], list[Problem]]:
    """Every prompt, and what is wrong with the settings or with them; with a limit, the function is only looked at."""
    name, folders, wrong = source.kind, plugins.folders_of(root), list(problems(task, source))
    if wrong or limit is not None:
        return [], wrong + list(plugins.problems("source", name, folders, field=FIELD))
    try:
        function = plugins.resolve("source", name, folders, field=FIELD)
        given = list(_rows(function(dict(source.config)), name))
    except RecipeError as error:
        return [], list(error.problems)
    except Exception as error:
        reason = f"{name} raised {plugins.describe_error(error, folders)}"
        return [], [Problem(field=FIELD, reason=reason, fix="mend it; it is called with task.source.config")]
    if given and all(isinstance(one, Prompt) for one in given):
        return _prompts(given, name)
    prompts, found = gather(task, source, enumerate(given, 1), _row, where=name, unit="row")
    if not prompts and not found:
        found.append(Problem(field=FIELD, reason=f"{name} gave no rows", fix=PLAIN))
    return prompts, found


def _rows(given: Any, name: str) -> Iterable[Any]:
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return given
    raise RecipeError.of(FIELD, f"{name} returned {type(given).__name__}, which is no list of rows", PLAIN)


def _row(given: Any) -> Row:
    """One row as an object of JSON. RowError if it is none."""
    if not isinstance(given, Mapping):
        raise RowError(f"the row is {type(given).__name__}, not a dict", PLAIN)
    try:
        row: Row = json.loads(json.dumps(dict(given), allow_nan=False))
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"the row holds what is no plain value: {error}", PLAIN) from None
    return row


def _prompts(given: list[Prompt], name: str) -> tuple[list[Prompt], list[Problem]]:
    """Prompts as they are; ids name prompts for ever, so no two may share one."""
    seen = set[str]()
    for number, prompt in enumerate(given, 1):
        reason = f"the id {prompt.id!r} is that of another prompt already" if prompt.id in seen else None
        seen.add(prompt.id)
        try:
            json.dumps([list(prompt.messages), dict(prompt.tags)], allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"the prompt holds what is no plain value: {error}"
        if reason or not prompt.messages or not isinstance(prompt.id, str):
            reason = reason or "the prompt has no messages, or an id that is no text"
            fix = "give every prompt an id of its own, messages, and tags of plain values"
            return [], [Problem(field=f"{name}:{number}", reason=reason, fix=fix)]
    return given, []
