"""Lines of JSON in a run folder, read back without trust: each is an object with a whole `step`, or it is passed over.

A kill tears the last line of a file, and a failing disk any. A torn last line was never finished and nobody misses it;
a damaged one that was finished is counted, so that whoever rewrites the file can keep what it was made from.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import StrettoError
from stretto.storage.atomic import read_small

RANGES = 5
"""Ranges of steps that are written out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """What could be read of a file of lines."""

    lines: tuple[tuple[int, str], ...]
    """The step and the text of each whole line."""
    damaged: int
    """How many finished lines are no rows."""

    def __iter__(self) -> Any:
        """The rows themselves."""
        return (json.loads(text) for _, text in self.lines)


def content_of(path: Path) -> bytes:
    """Content of a file of a run folder; empty if there is no such file.

    Raises:
        StrettoError: the system refuses to read the file.
    """
    try:
        return read_small(path)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except OSError as error:
        reason = f"{path}: cannot be read ({error.strerror or error})"
        raise StrettoError(f"{reason}\n    fix: make it a file that you may read, then try again") from error


def read_rows(path: Path) -> JsonLines:
    """The rows of a file; of one that is not there, none."""
    *finished, last = content_of(path).split(b"\n")
    lines, damaged = list[tuple[int, str]](), 0
    for line in (*finished, last):
        row = parsed(line)
        step = None if row is None else whole(row.get("step"))
        if step is not None:
            lines.append((step, line.decode("ascii")))
        elif line.strip() and line is not last:
            damaged += 1
    return JsonLines(lines=tuple(lines), damaged=damaged)


def step_ranges(steps: Collection[int]) -> str:
    """Steps in words, for example `steps 3, 7 to 12`; at most five ranges, and empty without steps."""
    ranges = list[list[int]]()
    for step in sorted(steps):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    shown = [str(low) if low == high else f"{low} to {high}" for low, high in ranges[:RANGES]]
    more = f" and {len(ranges) - RANGES} more ranges" if len(ranges) > RANGES else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(shown)}{more}" if steps else ""


def parsed(line: bytes) -> dict[str, Any] | None:
    """The object on a line, which is ASCII wherever stretto wrote it; none if there is no object."""
    try:
        found = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError):  # numbers of thousands of digits are a ValueError, too
        return None
    return found if isinstance(found, dict) else None


def whole(value: object) -> int | None:
    """A step, or none if it is no whole number."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """What of a row is a number."""
    return {name: value for name, value in row.items() if type(value) in (int, float)}
