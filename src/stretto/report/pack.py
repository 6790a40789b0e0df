"""What a page shows of runs, made small: columns instead of rows, whole numbers instead of decimals, and compressed.

A blob is compressed JSON as base64. Nothing a model wrote stands in the page in any other form, so none of it can end a
tag there. What each part holds is read back by `page/unpack.js`, the other half of this module.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from stretto.report.timeline import Span

MOST_SPANS = 60_000
"""Pieces of work that a timeline holds; a longer run shows its newest."""
SHOWN = 300
"""Characters of a prompt or an answer in the table of held-out answers."""
THOUSANDTHS = 1000
"""Log-probabilities and advantages are kept in thousandths."""


def blob(value: Any) -> str:
    """A value as compressed text of letters and digits."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return base64.b64encode(zlib.compress(text.encode("utf-8", errors="replace"), 9)).decode("ascii")


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Name -> its value in each row, or null; six digits, which is more than a curve shows."""
    names = sorted({name for row in rows for name in row})
    return {name: [_short(row.get(name)) for row in rows] for name in names}


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.6g}")


# Timeline -------------------------------------------------------------------------------------------------------------


def packed_spans(spans: Sequence[Span]) -> dict[str, Any]:
    """Columns of the newest spans, times in tenths of a millisecond; sessions of a resumed run stand one behind the
    other."""
    laid = list(_end_to_end(spans))
    kept = laid[-MOST_SPANS:]
    first = kept[0][1].step if len(kept) < len(laid) else 0
    kept = sorted((each for each in kept if each[1].step > first or not first), key=lambda each: each[0])
    cells = sorted({span.cell for _, span in kept}, key=_order)
    stages = sorted({span.stage for _, span in kept})
    starts = [round(start * 1e4) for start, _ in kept]
    return {
        "cells": cells,
        "stages": stages,
        "cell": [cells.index(span.cell) for _, span in kept],
        "stage": [stages.index(span.stage) for _, span in kept],
        "start": [start - before for start, before in zip(starts, [0, *starts], strict=False)],
        "length": [round(span.seconds * 1e4) for _, span in kept],
        "step": [span.step for _, span in kept],
        "tokens": [span.tokens for _, span in kept],
        "groups": [span.groups for _, span in kept],
        "from_step": first + 1 if first else None,
    }


def _end_to_end(spans: Sequence[Span]) -> Iterable[tuple[float, Span]]:
    """(start on one clock, span); a session's own clock begins at 0, and its first step lies before what was there."""
    shift = reached = begun = 0.0
    for _, step in groupby(spans, key=lambda span: span.step):
        together = list(step)
        start = min(span.start for span in together)
        if start < begun:
            shift = reached
        begun = start
        for span in together:
            reached = max(reached, shift + span.start + span.seconds)
            yield shift + span.start, span


def _order(cell: str) -> tuple[int, str]:
    """Generation first, then scoring, then training; reward functions last."""
    ranks = ("generate", "reference", "value", "reward", "train", "fit", "judges")
    return next((index for index, role in enumerate(ranks) if cell.startswith(role)), len(ranks)), cell


# Samples --------------------------------------------------------------------------------------------------------------


def packed_step(rows: Sequence[Mapping[str, Any]], *, limit: int) -> str | None:
    """The blob of a step's trajectories by group, of at most so many letters: where they are more, the first groups
    that fit, with how many are left out; none where not even one fits."""
    groups = _groups(rows)
    count = len(groups)
    while count:
        text = blob({"groups": groups[:count], "left_out": len(groups) - count})
        if len(text) <= limit:
            return text
        count = min(count - 1, int(count * limit / len(text)))
    return None


def packed_heldout(evaluations: Mapping[int, Sequence[Mapping[str, Any]]], *, limit: int) -> str | None:
    """The blob of held-out answers of some evaluations, a line for each prompt, of at most so many letters; none where
    there are none, or not even one fits."""
    lines: dict[str, dict[str, Any]] = {}
    for place, rows in enumerate(evaluations.values()):
        for row in rows:
            with suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):  # no trajectory of ours
                line = {
                    "prompt": str(row["prompt"])[:SHOWN],
                    "asked": _cut(row["messages"][-1]["content"]),
                    "reference": None if row.get("reference") is None else _cut(row["reference"]),
                    "answers": [None] * len(evaluations),
                }
                said = row["conversations"][-1]["text"] if row.get("answer") is None else row["answer"]
                reward = row["reward"]["value"] if row.get("reward") else None
                answer = {"text": _cut(said), "reward": reward, "failure": row.get("failure")}
                lines.setdefault(str(row["prompt"]), line)["answers"][place] = answer
    found, count = list(lines.values()), len(lines)
    while count:
        text = blob({"steps": list(evaluations), "rows": found[:count], "left_out": len(found) - count})
        if len(text) <= limit:
            return text
        count = min(count - 1, int(count * limit / len(text)))
    return None


def _cut(value: Any) -> str:
    """A text of a prompt or an answer, no longer than a line of a table shows."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _groups(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, Any], dict[str, Any]] = {}
    for row in rows:
        with suppress(KeyError, TypeError, ValueError, IndexError, AttributeError):  # no trajectory of ours
            attempt = _attempt(row)
            head = {name: row.get(name) for name in ("prompt", "visit", "messages", "reference", "environment")}
            found.setdefault((str(row["prompt"]), int(row["visit"])), {**head, "attempts": []})["attempts"].append(
                attempt
            )
    for group in found.values():
        group["attempts"].sort(key=lambda each: each["attempt"])
    return list(found.values())


def _attempt(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: row.get(name) for name in ("answer", "reward", "failure", "used")}
    return {
        "attempt": int(row["attempt"]),
        **kept,
        "conversations": [_conversation(each) for each in row.get("conversations") or ()],
    }


def _conversation(row: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of trained tokens alone; `runs` says how many tokens are context, sampled, context and so on."""
    trained = [bool(flag) for flag in row["trained"]]
    sampled = [index for index, flag in enumerate(trained) if flag]
    packed: dict[str, Any] = {name: row.get(name) for name in ("stop", "version", "parent", "text")}
    packed["runs"] = _runs(trained)
    for name in ("logprobs", "advantages", "trainer_logprobs"):
        if numbers := row.get(name):
            packed[name] = [round((numbers[index] or 0.0) * THOUSANDTHS) for index in sampled]
    if "advantages" in packed:  # mostly one number for a whole answer
        packed["advantages"] = [[value, len(list(same))] for value, same in groupby(packed["advantages"])]
    if widths := row.get("widths"):
        packed["widths"] = widths
    else:
        packed["tokens"] = row["tokens"]
    return packed


def _runs(flags: Sequence[bool]) -> list[int]:
    """Lengths of the runs, the first of those that are false."""
    lengths = [len(list(same)) for _, same in groupby(flags)]
    return [0, *lengths] if flags and flags[0] else lengths
