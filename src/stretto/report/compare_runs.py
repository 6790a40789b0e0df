"""Several runs beside each other: what differs in their recipes, what they came to, and whether chance would do it.

It reads run folders. Accuracies of the same held-out prompts are compared prompt by prompt; others, and those of runs
that kept no verdicts, as shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

from stretto.errors import RecipeError
from stretto.recipe.schema.rewards import RewardPart
from stretto.report.chances import Difference, paired, unpaired
from stretto.report.read_run import RunRecord, changed_keys, flat
from stretto.report.samples_text import harmless
from stretto.types import FULL_MARKS

LAST = 5
"""Steps at the end whose rewards are averaged."""

PART = "eval/reward/part/"
"""Prefix of the metrics of held-out parts of the reward."""

PAIRS = 10
"""Pairs of runs that are put into sentences, those with the first run before others."""

SAME_PROMPTS = ("task.source.", "task.holdout.")
"""Keys that decide which prompts are held out."""

SAMPLED = ("task.source.seed", "task.source.count")
"""Keys that choose other prompts of the same kind."""


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
    heldout_reward: float | None
    """Mean held-out reward at the last evaluation."""
    heldout_parts: Mapping[str, float]
    """Part of the reward -> its held-out mean there."""
    lost: str
    """Steps that metrics.jsonl lacks, in words; empty if it lacks none."""
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
            heldout_reward=last.get("eval/reward") if last else None,
            heldout_parts={n.removeprefix(PART): value for n, value in (last or {}).items() if n.startswith(PART)},
            lost=run.lost,
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
    verdicts: Mapping[tuple[str, str], str]
    """(run, other run) -> whether they can be told apart, or why their accuracies do not measure the same."""

    def __str__(self) -> str:
        lost = [f"{run.name}: {run.lost}; its numbers are of the other steps" for run in self.runs if run.lost]
        parts = ["\n".join([*table(self.runs), *lost]), "\n".join(self._parts()), "\n".join(self._changes())]
        parts.append("\n".join(self.sentences()))
        return "\n\n".join(part for part in parts if part)

    def sentences(self) -> list[str]:
        """Which runs can be told apart."""
        return list(self.verdicts.values())[:PAIRS]

    def _parts(self) -> list[str]:
        """Held-out means of the parts of the reward, where some run has several."""
        names = list(dict.fromkeys(name for run in self.runs for name in run.heldout_parts))
        if len(names) < 2:
            return []
        rows = [["held-out part", *(run.name for run in self.runs)]]
        return columns(rows + [[name, *(_number(run.heldout_parts.get(name)) for run in self.runs)] for name in names])

    def _changes(self) -> list[str]:
        if not self.changed:
            return ["the recipes are the same"]
        rows = [["what differs", *(run.name for run in self.runs)]]
        rows += [[key, *map(_value, values)] for key, values in self.changed.items()]
        return columns(rows)


def compare(runs: Sequence[RunRecord]) -> RunComparison:
    """Compares runs, two or more."""
    places = [run.folder.resolve() for run in runs]
    if twice := next((run.folder for run, place in zip(runs, places, strict=True) if places.count(place) > 1), None):
        raise RecipeError.of("RUN", f"{twice} is named twice, and a run always equals itself", "name other runs")
    names = _apart([run.name for run in runs], [str(run.folder) for run in runs])
    found = [RunSummary.of(run) for run in runs]
    changed = changed_keys(list(runs))
    differences: dict[tuple[str, str], Difference] = {}
    verdicts: dict[tuple[str, str], str] = {}
    for (i, one), (j, other) in combinations(enumerate(found), 2):
        if one.accuracy is not None and other.accuracy is not None and one.prompts and other.prompts:
            pair = names[i], names[j]
            differences[pair], verdicts[pair] = pair_verdict(pair, (runs[i], runs[j]), (one, other))
    return RunComparison(runs=tuple(found), changed=changed, differences=differences, verdicts=verdicts)


def pair_verdict(
    names: tuple[str, str], runs: tuple[RunRecord, RunRecord], found: tuple[RunSummary, RunSummary]
) -> tuple[Difference, str]:
    """Return the accuracy difference of the second run to the first, and a sentence about it."""
    (one, other), same = names, same_prompts(*runs)
    difference = accuracy_difference(*found, same_prompts=same)
    if why := measured_apart(*runs):
        told = f"{one} and {other}: {why}, so the accuracies do not measure the same and there is no winner"
        return difference, told
    return difference, sentence(one, other, difference, same_prompts=same)


def verdicts_of(run: RunRecord, step: int) -> dict[str, bool]:
    """Which held-out prompts were answered right after a step."""
    for event in reversed(run.events):
        if event.get("kind") == "evaluated" and event.get("step") == step:
            right, wrong = (event.get(name) for name in ("right", "wrong"))
            if isinstance(right, list) and isinstance(wrong, list):
                return dict.fromkeys(map(str, wrong), False) | dict.fromkeys(map(str, right), True)
    with suppress(KeyError, TypeError, ValueError):  # the answers say it too, where they were kept
        judged = [row for row in run.samples(step, held_out=True) if row.get("reward")]
        return {str(row["prompt"]): float(row["reward"]["outcome"]) >= FULL_MARKS for row in judged}
    return {}


def accuracy_difference(one: RunSummary, other: RunSummary, *, same_prompts: bool) -> Difference:
    """How far the second is above the first: by prompts where both were asked the same, else by numbers."""
    found = paired(one.verdicts, other.verdicts) if same_prompts else None
    if found is not None and found.prompts == one.prompts == other.prompts:
        return found
    assert one.accuracy is not None and other.accuracy is not None
    return unpaired(
        round(one.accuracy * one.prompts), one.prompts, round(other.accuracy * other.prompts), other.prompts
    )


def same_prompts(one: RunRecord, other: RunRecord) -> bool:
    """True if both hold out the same prompts."""
    mine, theirs = ({k: v for k, v in flat(run.recipe) if k.startswith(SAME_PROMPTS)} for run in (one, other))
    return mine == theirs


def measured_apart(one: RunRecord, other: RunRecord) -> str:
    """Return the reason why two accuracies are not comparable (other rewards or other data), or an empty string."""
    mine, theirs = (dict(flat({"rewards": scoring(run)})) for run in (one, other))
    if keys := _differing(mine, theirs):
        return f"their rewards differ ({', '.join(keys)})"
    mine, theirs = (dict(flat({"task": {"source": run.setting("task.source", {})}})) for run in (one, other))
    keys = [key for key in _differing(mine, theirs) if key not in SAMPLED]
    return f"their tasks differ ({', '.join(keys)})" if keys else ""


def scoring(run: RunRecord) -> dict[str, Any]:
    """Return the recipe keys that decide whether an answer is correct: reward parts without names and weights, the
    environment if it gives the signal, and the reward model if nothing else scores."""
    parts = [dict(part) for part in run.setting("rewards") or () if isinstance(part, Mapping)]
    counted = [part for part in parts if _judges(part) and (part.get("weight", 1.0) or 0) > 0]
    found: dict[str, Any] = {}
    for part in counted or parts:
        free = ("name", "weight", *["deadline"] * (":" in str(part.get("kind"))))
        kept = {key: value for key, value in part.items() if key not in free}
        found[f"{part.get('kind')}{'+' * sum(name.startswith(str(part.get('kind'))) for name in found)}"] = kept
    if any(part.get("kind") == "signal" for part in counted):
        section = run.setting("environment", {})
        found["environment"] = {key: value for key, value in section.items() if key not in ("deadline", "hosts")}
    if not counted and parts:
        found["reward_model"] = run.setting("roles.reward_model")
    return found


def _judges(part: Mapping[str, Any]) -> bool:
    """True for a part of a kind that says of an answer that it is right."""
    try:
        return RewardPart(**part).judges
    except ValueError:  # of another version
        return True


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Keys whose values differ."""
    return [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]


def sentence(one: str, other: str, difference: Difference, *, same_prompts: bool) -> str:
    """Whether two runs can be told apart, in words."""
    kind = "the same prompts" if same_prompts else "each run's own prompts"
    kind += "" if difference.paired or not same_prompts else ", compared as shares because a run kept no verdicts"
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
    heldout = any(run.heldout_reward is not None for run in runs)
    rows = [["run", "steps", "accuracy", "95 % interval", *["held-out reward"] * heldout, "reward", "s/step", "GB"]]
    for run in runs:
        accuracy = "-" if run.accuracy is None else f"{run.accuracy:.2f}"
        accuracy += "" if run.evaluated in (None, run.steps) else f" (step {run.evaluated})"
        interval = "-" if run.interval is None else f"{run.interval[0]:.2f} to {run.interval[1]:.2f}"
        steps = f"{run.steps}" if run.steps == run.of_steps else f"{run.steps} of {run.of_steps}"
        numbers = [*[run.heldout_reward] * heldout, run.reward, run.seconds, run.memory_gb]
        rows.append([run.name, steps, accuracy, interval, *map(_number, numbers)])
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
