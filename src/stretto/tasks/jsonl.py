"""Prompts from a file with one JSON object per line.

The file may come from anywhere: a line that is not UTF-8, not JSON, not an object or not like the first one is reported
with its number, several at once, and nothing of it reaches the run. Blank lines are skipped.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from itertools import count as counting
from itertools import islice
from pathlib import Path
from typing import Any

from stretto.errors import Problem
from stretto.recipe.schema import JsonlSource, TaskSection
from stretto.tasks.columns import Row, RowError
from stretto.tasks.rows import find, gather, problems
from stretto.types import Prompt

OBJECT = "write one JSON object per line"
LONGEST_ROW = 4 * 2**20
"""Bytes of a line; nothing of a longer one is kept or parsed."""


def read(task: TaskSection, source: JsonlSource, root: Path, limit: int | None) -> tuple[list[Prompt], list[Problem]]:
    """The prompts of the file, or of its first `limit` rows, and what is wrong with the settings or with it."""
    wrong, path = list(problems(task, source)), find(source.path, root, "file", os.path.isfile)
    if isinstance(path, Problem):
        return [], [*wrong, path]
    prompts, found = _read(task, source, path, limit)
    return prompts, wrong + found


def places(task: TaskSection, source: JsonlSource, root: Path) -> dict[str, str]:
    """Prompt id -> file:line, of a file with which nothing is wrong."""
    path, told = find(source.path, root, "file", os.path.isfile), dict[str, str]()
    if isinstance(path, Path):
        _read(task, source, path, None, told)
    return told


def _read(
    task: TaskSection, source: JsonlSource, path: Path, limit: int | None, told: dict[str, str] | None = None
) -> tuple[list[Prompt], list[Problem]]:
    rows = islice(_lines(path), limit)
    try:
        prompts, found = gather(task, source, rows, _row, where=str(path), unit="line", places=told)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        return [], [Problem(field=str(path), reason=reason, fix="make it readable")]
    if not prompts and not found:
        found.append(Problem(field=str(path), reason="the file holds no rows", fix=OBJECT))
    return prompts, found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line that is not blank, with its number; of one that is too long, the beginning."""
    with path.open("rb") as file:
        for number in counting(1):
            line = rest = file.readline(LONGEST_ROW + 1)
            while len(rest) > LONGEST_ROW and not rest.endswith(b"\n"):
                rest = file.readline(LONGEST_ROW + 1)
            if not line:
                return
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                yield number, content


def _row(line: bytes) -> Row:
    """One line as an object. RowError if it is none."""
    if len(line) > LONGEST_ROW:
        raise RowError(f"the line has more than {LONGEST_ROW // 2**20} MiB", "shorten it, or take it out")
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_refuse, object_pairs_hook=_object)
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


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """An object; ValueError for a key that it has twice, of which Python's reader would take the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for place, (key, _) in enumerate(pairs) if key in dict(pairs[:place]))
        raise ValueError(f"it has the key {twice!r} twice")
    return row


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")
