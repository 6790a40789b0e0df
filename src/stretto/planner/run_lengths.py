"""Lengths that a run has recorded: its samples, read as plain data.

A line that cannot be read is passed over, because a run may have been killed while it wrote one. What stands in a line
is never trusted further than that it is a list of so many items.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from stretto.errors import RecipeError
from stretto.planner.cost.lengths import LengthDistribution

FIELD = "batch.lengths.from_run"
MOST_ANSWERS = 100_000
"""The newest that are read: enough for any tail."""


def recorded_lengths(run: str, root: Path, *, cap: int) -> tuple[int, LengthDistribution]:
    """Mean prompt tokens, and the lengths of answers up to `cap`, of a run's newest samples."""
    folder = next((place for place in (root / run, Path(run)) if (place / "samples").is_dir()), None)
    if folder is None:
        raise RecipeError.of(FIELD, f"{run} is no folder of a run with samples", "name a run, such as runs/tiny-001")
    prompts: list[int] = []
    answers: list[int] = []
    for prompt, answer in _sizes(folder / "samples"):
        prompts.append(prompt)
        answers.append(min(answer, cap))
        if len(answers) == MOST_ANSWERS:
            break
    if not answers:
        raise RecipeError.of(FIELD, f"{folder / 'samples'} holds no sample that can be read", "name another run")
    return round(fmean(prompts)), LengthDistribution.from_samples(answers, cap=cap)


def _sizes(folder: Path) -> Iterator[tuple[int, int]]:
    """Prompt and answer tokens of each conversation, newest step first."""
    for path in sorted(folder.glob("step-*.jsonl"), reverse=True):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                yield from _of_line(line)


def _of_line(line: str) -> Iterator[tuple[int, int]]:
    try:
        conversations = json.loads(line)["conversations"]
        for conversation in conversations:
            trained = [bool(flag) for flag in conversation["trained"]]
            if any(trained):
                yield trained.index(True), sum(trained)
    except (ValueError, TypeError, KeyError, RecursionError):
        return
