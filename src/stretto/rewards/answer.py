"""Verdicts on an answer that need nothing but the answer and the reference: exact, numeric, regex-extracted.

Answers are hostile text of any length. `exact` and `numeric` take time linear in it. `regex` runs a pattern that the
user wrote, which can backtrack for ever, so it is only ever called in a worker process with a deadline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from stretto.readings import numbers, value

Pick = Literal["last", "first", "only"]
Compare = Literal["exact", "numeric"]


def exact(answer: str, reference: str) -> float:
    """1 if both texts are equal but for white space around them."""
    return float(answer.strip() == reference.strip())


def numeric(answer: str, reference: str, pick: Pick) -> float:
    """1 if the picked number of the answer has the very value of the reference; 7, 7.0 and 14/2 are equal."""
    wanted = list(numbers(reference))
    if len(wanted) != 1:
        raise ValueError(f"the reference answer {reference[:80]!r} holds {len(wanted)} numbers instead of one")
    found = _picked(numbers(answer), pick)
    return float(found is not None and value(found) == value(wanted[0]) is not None)


def regex(answer: str, reference: str, pattern: str, pick: Pick, compare: Compare) -> float:
    """1 if what the pattern extracts from the answer agrees with the reference. Only to be called in a worker."""
    found = extract(answer, pattern, pick)
    if found is None:
        return 0.0
    return numeric(found, reference, "only") if compare == "numeric" else exact(found, reference)


def extract(answer: str, pattern: str, pick: Pick) -> str | None:
    """The first group of the picked match, or all of it; none where nothing matches. Only to be called in a worker."""
    matches = re.finditer(pattern, answer)
    return _picked((match.group(1 if match.re.groups else 0) or "" for match in matches), pick)


def overlong(tokens: int, *, longest: int, buffer: int) -> float:
    """0 up to `buffer` tokens before `longest`, then falling to -1 at `longest`. Yu et al. 2025 (DAPO), eq. 13.

    It stays at -1 beyond, where answers come that may be longer than `longest`: several turns, or a low `longest`.
    """
    return max(-1.0, min(0.0, (longest - buffer - tokens) / buffer))


def _picked(found: Iterator[str], pick: Pick) -> str | None:
    """The first, the last, or the only one of them; none if there is no such."""
    first = next(found, None)
    if first is None or pick == "first":
        return first
    last = first
    for another in found:
        if pick == "only":
            return None
        last = another
    return last
