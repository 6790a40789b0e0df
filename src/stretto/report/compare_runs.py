"""Several runs beside each other: what differs in their recipes, what they came to, and whether chance would do it.

It reads run folders. Accuracies of the same held-out prompts are compared prompt by prompt; others, and those of runs
that kept no verdicts, as shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

from stretto.report.chances import Difference, paired, unpaired
from stretto.report.read_run import RunRecord, changed_keys, flat
from stretto.report.samples_text import harmless

LAST = 5
"""Steps at the end whose rewards are averaged."""

PAIRS = 10
"""Pairs of runs that are put into sentences, those with the first run before others."""

SAME_TASK = ("task.source.", "task.holdout.", "rewards.")
"""Keys that decide which prompts are held out and when an answer is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run came to."""

    name: str
    """The name of its folder."""
    steps: int
    """Steps that it took."""
    of_steps: int
    """Steps of its recipe."""
    evaluated: int | None
    """The last step that was evaluated; none if none was."""
    accuracy: float | None
    """Held-out accuracy after it."""
    interval: tuple[float, float] | None
    """Its 95 % interval."""
    prompts: int
    """Prompts that it is over."""
    verdicts: Mapping[str, bool]
    """Prompt id -> whether it was answered right there; empty where the run kept none."""
    reward: float | None
    """Mean reward of the last steps."""
    seconds: float | None
    """Seconds of a step, the median."""
    memory_gb: float | None
    """Most memory."""

    @classmethod
    def of(cls, run: RunRecord) -> RunSummary:
        """Reads a run's folder."""
        rows = run.metrics
        judged = [row for row in rows if "eval/accuracy" in row]
        last = judged[-1] if judged else None
        rewards = [row["reward/mean"] for row in rows if "reward/mean" in row][-LAST:]
        seconds = [row["seconds/step"] for row in rows if "seconds/step" in row]
        step = int(last["step"]) if last else None
        return cls(
            name=run.name,
            steps=run.steps,
            of_steps=int(run.setting("run.steps", 0)),
            evaluated=step,
            accuracy=last["eval/accuracy"] if last else None,
            interval=(last.get("eval/low", 0.0), last.get("eval/high", 1.0)) if last else None,
            prompts=int(last.get("eval/n", 0)) if last else 0,
            verdicts={} if step is None else verdicts_of(run, step),
            reward=fmean(rewards) if rewards else None,
            seconds=median(seconds) if seconds else None,
            memory_gb=max((row["memory/peak_gb"] for row in rows if "memory/peak_gb" in row), default=None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Runs beside each other; `print` shows the page."""

    runs: tuple[RunSummary, ...]
    """Each run."""
    changed: Mapping[str, Sequence[Any]]
    """Dotted key -> its value in each run, of the keys in which they differ."""
    differences: Mapping[tuple[str, str], Difference]
    """(run, other run) -> how far the accuracy of the other is above that of the first."""

    def __str__(self) -> str:
        parts = ["\n".join(table(self.runs)), "\n".join(self._changes()), "\n".join(self.sentences())]
        return "\n\n".join(part for part in parts if part)

    def sentences(self) -> list[str]:
        """Which runs can be told apart."""
        return [sentence(*names, difference) for names, difference in list(self.differences.items())[:PAIRS]]

    def _changes(self) -> list[str]:
        if not self.changed:
            return ["the recipes are the same"]
        rows = [["what differs", *(run.name for run in self.runs)]]
        rows += [[key, *map(_value, values)] for key, values in self.changed.items()]
        return columns(rows)


def compare(runs: Sequence[RunRecord]) -> RunComparison:
    """Compares runs, two or more."""
    names = _apart([run.name for run in runs], [str(run.folder) for run in runs])
    found = [RunSummary.of(run) for run in runs]
    changed = changed_keys(list(runs))
    differences: dict[tuple[str, str], Difference] = {}
    for (i, one), (j, other) in combinations(enumerate(found), 2):
        if one.accuracy is not None and other.accuracy is not None and one.prompts and other.prompts:
            differences[names[i], names[j]] = accuracy_difference(one, other, same_task=same_task(runs[i], runs[j]))
    return RunComparison(runs=tuple(found), changed=changed, differences=differences)


def verdicts_of(run: RunRecord, step: int) -> dict[str, bool]:
    """Which held-out prompts were answered right after a step."""
    for event in reversed(run.events):
        if event.get("kind") == "evaluated" and event.get("step") == step:
            right, wrong = (event.get(name) for name in ("right", "wrong"))
            if isinstance(right, list) and isinstance(wrong, list):
                return dict.fromkeys(map(str, wrong), False) | dict.fromkeys(map(str, right), True)
    return {}


def accuracy_difference(one: RunSummary, other: RunSummary, *, same_task: bool) -> Difference:
    """How far the second is above the first: by prompts where both were asked the same, else by numbers."""
    found = paired(one.verdicts, other.verdicts) if same_task else None
    if found is not None and found.prompts == one.prompts == other.prompts:
        return found
    assert one.accuracy is not None and other.accuracy is not None
    return unpaired(
        round(one.accuracy * one.prompts), one.prompts, round(other.accuracy * other.prompts), other.prompts
    )


def same_task(one: RunRecord, other: RunRecord) -> bool:
    """True if both hold out the same prompts and judge alike."""
    mine, theirs = ({k: v for k, v in flat(run.recipe) if k.startswith(SAME_TASK)} for run in (one, other))
    return mine == theirs


def sentence(one: str, other: str, difference: Difference) -> str:
    """Whether two runs can be told apart, in words."""
    kind = "the same prompts" if difference.paired else "each run's own prompts"
    numbers = (
        f"{difference.value:+.2f}, 95 % interval {difference.low:+.2f} to {difference.high:+.2f}, "
        f"p {difference.chance:.2g}, {kind}"
    )
    if difference.told_apart:
        better, worse = (other, one) if difference.value > 0 else (one, other)
        return f"{better} is better than {worse} (accuracy {numbers})"
    told = f"{one} and {other} cannot be told apart with {difference.prompts} prompts (accuracy {numbers})"
    if difference.value == 0:
        return told
    half = (difference.high - difference.low) / 2
    needed = max(difference.prompts + 1, difference.prompts * (half / abs(difference.value)) ** 2)
    return f"{told}; a difference of this size would show with about {float(f'{needed:.2g}'):,.0f} prompts"


def table(runs: Sequence[RunSummary]) -> list[str]:
    """A row for each run."""
    rows = [["run", "steps", "accuracy", "95 % interval", "reward", "s/step", "GB"]]
    for run in runs:
        accuracy = "-" if run.accuracy is None else f"{run.accuracy:.2f}"
        accuracy += "" if run.evaluated in (None, run.steps) else f" (step {run.evaluated})"
        interval = "-" if run.interval is None else f"{run.interval[0]:.2f} to {run.interval[1]:.2f}"
        steps = f"{run.steps}" if run.steps == run.of_steps else f"{run.steps} of {run.of_steps}"
        rows.append([run.name, steps, accuracy, interval, *map(_number, (run.reward, run.seconds, run.memory_gb))])
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, the first column to the left, the others to the right."""
    shown = [[harmless(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in shown) for i in range(len(shown[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _value(value: Any) -> str:
    text = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 32 else f"{text[:29]}..."


def _apart(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Names that tell runs apart: of folders with the same name the whole path."""
    return [name if names.count(name) == 1 else folder for name, folder in zip(names, folders, strict=True)]
