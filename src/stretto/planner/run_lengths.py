"""Lengths and verdicts that a run has recorded: its samples, read as plain data.

A line that cannot be read is passed over, because a run may have been killed while it wrote one. What stands in a line
is never trusted further than that it is a list of so many items.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from stretto.errors import RecipeError
from stretto.planner.cost.lengths import LengthDistribution

FIELD = "batch.lengths.from_run"
MOST_ANSWERS = 100_000
"""The newest that are read: enough for any tail."""


class RecordedAnswers(NamedTuple):
    """What a run's samples say of answers to come."""

    prompt: int
    """Mean tokens of a prompt."""
    lengths: LengthDistribution
    """Lengths of the answers."""
    contrast: float | None = None
    """Share of the groups whose outcomes differ; none where no group has two verdicts."""
    conversations: float = 1.0
    """Mean number of conversations per trajectory that hold sampled tokens."""


def recorded_answers(run: str, root: Path, *, cap: int) -> RecordedAnswers:
    """What a run's newest samples say, answers counted up to `cap`."""
    folder = next((place for place in (root / run, Path(run)) if (place / "samples").is_dir()), None)
    if folder is None:
        raise RecipeError.of(FIELD, f"{run} is no folder of a run with samples", "name a run, such as runs/tiny-001")
    prompts: list[int] = []
    answers: list[int] = []
    trajectories = 0
    outcomes: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
    for path, row in _rows(folder / "samples"):
        sizes = list(_sizes(row))
        trajectories += bool(sizes)
        for prompt, answer in sizes:
            prompts.append(prompt)
            answers.append(min(answer, cap))
        for name, visit, outcome in _verdict(row):
            outcomes[path, name, visit].append(outcome)
        if len(answers) >= MOST_ANSWERS:
            break
    if not answers:
        raise RecipeError.of(FIELD, f"{folder / 'samples'} holds no sample that can be read", "name another run")
    judged = [len(set(group)) > 1 for group in outcomes.values() if len(group) > 1]
    return RecordedAnswers(
        prompt=round(fmean(prompts)),
        lengths=LengthDistribution.from_samples(answers[:MOST_ANSWERS], cap=cap),
        contrast=fmean(judged) if judged else None,
        conversations=len(answers) / trajectories,
    )


def _rows(folder: Path) -> Iterator[tuple[str, Any]]:
    """(file, a line of it), newest step first."""
    for path in sorted(folder.glob("step-*.jsonl"), reverse=True):
        with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                with suppress(ValueError, RecursionError):
                    yield path.name, json.loads(line)


def _sizes(row: Any) -> Iterator[tuple[int, int]]:
    """Prompt and answer tokens of each conversation."""
    with suppress(TypeError, KeyError):
        for conversation in row["conversations"]:
            trained = [bool(flag) for flag in conversation["trained"]]
            if any(trained):
                yield trained.index(True), sum(trained)


def _verdict(row: Any) -> Iterator[tuple[str, int, float]]:
    """Prompt, visit and outcome of a trajectory that was judged."""
    with suppress(TypeError, KeyError, ValueError, OverflowError):
        yield str(row["prompt"]), int(row["visit"]), float(row["reward"]["outcome"])
