"""What the diagnosis of a run reads of a step: its metrics, and what its answers look like.

It counts and correlates, and judges nothing. Rows are those of the samples file.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import compress
from typing import Any

MARKER = re.compile(
    r"<\|[a-z_]+\|>|</?s>|\[/?INST\]|<(?:start|end)_of_turn>|^\s*(?:user|human|assistant|system)\s*:",
    re.IGNORECASE | re.MULTILINE,
)
"""What opens or closes a turn in the chat templates of the common families of models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """A step as its diagnosis sees it."""

    step: int
    """Its number."""
    metrics: Mapping[str, float]
    """By the names of metrics.jsonl."""
    answers: int
    """Answers with or without a verdict."""
    unended: float
    """Share of answers of which no conversation was ended by the model."""
    marked: float
    """Share of answers in which the model opens or closes turns within its own."""
    ran_on: float
    """Share of answers that hold the reference answer, go on behind it, and were not ended by the model."""
    cut_calls: tuple[int, ...] = ()
    """Of each conversation that was cut off, the tokens of its last call."""
    follows_length: Mapping[str, float]
    """Part of the reward -> its correlation with the number of sampled tokens, within groups; only where both vary."""


def facts_of(
    step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]], turn_tokens: Set[int] = frozenset()
) -> StepFacts:
    """The facts of a step. `turn_tokens` are special tokens that no reply holds, but for the one that ends it."""
    talks = [row["conversations"] for row in rows]
    cut = [talk for each in talks for talk in each if talk["stop"] == "length"]
    unended = [bool(each) and not any(talk["stop"] == "stop" for talk in each) for each in talks]
    return StepFacts(
        step=step,
        metrics=metrics,
        answers=len(rows),
        unended=_share(unended),
        marked=_share(_marked(row, turn_tokens) for row in rows),
        ran_on=_share(
            ended is True and _goes_on(row.get("answer"), row.get("reference"))
            for ended, row in zip(unended, rows, strict=True)
        ),
        cut_calls=tuple(talk["turns"][-1][1] if talk.get("turns") else sum(talk["trained"]) for talk in cut),
        follows_length=_follows_length(rows),
    )


def _share(verdicts: Iterable[bool]) -> float:
    found = list(verdicts)
    return sum(found) / len(found) if found else 0.0


def _marked(row: Mapping[str, Any], turn_tokens: Set[int]) -> bool:
    """True if a reply holds marks of turns, as tokens or in words; of several conversations the first is looked at."""
    if MARKER.search(str(row.get("answer") or "")) is not None:
        return True
    if not turn_tokens or not row["conversations"]:
        return False
    talk = row["conversations"][0]
    return not turn_tokens.isdisjoint(compress(talk["tokens"], talk["trained"]))


def _goes_on(answer: object, reference: object) -> bool:
    if not isinstance(answer, str) or reference is None or not (wanted := str(reference).strip()):
        return False
    return answer.strip().startswith(wanted) and len(answer.strip()) > len(wanted)


def _follows_length(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Correlations within groups: of differences from the group's means."""
    groups: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("reward"):
            groups[row["prompt"], row["visit"]].append(row)
    names = {name for row in rows if row.get("reward") for name in row["reward"]["parts"]}
    found = {}
    for name in names:
        pairs: list[tuple[float, float]] = []
        for group in groups.values():
            here = [
                (_length(row), float(row["reward"]["parts"][name])) for row in group if name in row["reward"]["parts"]
            ]
            means = [sum(column) / len(here) for column in zip(*here, strict=True)] if here else [0.0, 0.0]
            pairs += [(length - means[0], value - means[1]) for length, value in here]
        if (correlation := _correlation(pairs)) is not None:
            found[name] = correlation
    return found


def _length(row: Mapping[str, Any]) -> float:
    return float(sum(sum(talk["trained"]) for talk in row["conversations"]))


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    across, up = (sum(pair[i] ** 2 for pair in pairs) for i in (0, 1))
    if across <= 1e-12 or up <= 1e-12:
        return None
    return sum(x * y for x, y in pairs) / math.sqrt(across * up)
