"""How a run ends: what it came to, what is shown of that at last, and which command goes on from there.

A finished run says that it is finished, also when it is resumed for nothing. One that was asked to end says where it
stands, once, as the message of the `RunStopped` that ends it. Files are only looked at here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import CheckpointError
from stretto.recipe.schema import Recipe
from stretto.report.console import Progress
from stretto.runtime.evaluate import Evaluation, measured_words, of_asked
from stretto.runtime.inputs import allowed_before
from stretto.runtime.recipe_changes import as_arguments
from stretto.runtime.recipe_file import load_run_recipe
from stretto.storage.checkpoint import Checkpoints
from stretto.storage.json_lines import numbers_of, read_rows

PART = "eval/reward/part/"
"""Prefix of the metrics of held-out parts of the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """A run's folder, which stays the same when user code changes the working directory while the run trains."""

    folder: Path
    """Absolute path."""
    named: Path
    """The path as the user named it, perhaps relative."""
    begun_in: Path
    """Working directory when the run began."""

    @classmethod
    def of(cls, named: Path) -> RunPlace:
        """Place of a folder that is named in the current working directory."""
        return cls(folder=named.absolute(), named=named, begun_in=Path.cwd())

    @property
    def shown(self) -> Path:
        """Path to print and return: as named, while the working directory is the one the run began in."""
        try:
            return self.named if Path.cwd() == self.begun_in else self.folder
        except OSError:  # the working directory was removed
            return self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a run came to."""

    folder: Path
    """The run's folder."""
    model: Path
    """The checkpoint of its last step."""
    evaluations: tuple[tuple[int, Evaluation], ...]
    """(step, evaluation), those of this session."""


def finished(
    screen: Progress,
    place: RunPlace,
    model: Path,
    steps: int,
    evaluations: Sequence[tuple[int, Evaluation]] = (),
    beside: Sequence[str] = (),
) -> Finished:
    """What a run of so many steps came to, which is shown with the lines `beside` it and how it could go further."""
    shown = place.shown
    found = Finished(folder=shown, model=shown / model.relative_to(place.folder), evaluations=tuple(evaluations))
    more = f"stretto resume {shlex.quote(str(shown))} run.steps={2 * steps} --allow run.steps"
    told = f"finished: {steps} of {steps} steps; go further with: {more}"
    screen.finish([*summary(found), *beside, "", told])
    return found


def where_it_stands(place: RunPlace, checkpoints: Checkpoints, steps: int, asked: Sequence[str] = ()) -> str:
    """What a run that was asked to end says last; `asked` is what its resume was to change and has not written down."""
    newest = checkpoints.newest()
    if not (place.folder / "recipe.yaml").exists():
        return "stopped before anything was begun"
    where = "before a checkpoint; begin again" if newest is None else f"after step {newest} of {steps}; go on"
    return f"stopped {where} with: {shlex.join(['stretto', 'resume', str(place.shown), *asked])}"


def unwritten(folder: Path, old: Recipe, new: Recipe, *, allow: Sequence[str], step: int) -> list[str]:
    """What a resume from this step was asked to change, as its arguments, if it ended before it wrote that down."""
    asked = old != new or not set(allow) <= {*allowed_before(folder, step)}
    return as_arguments(old, new, allow) if asked and load_run_recipe(folder)[0] == old else []


def sound(checkpoints: Checkpoints) -> Path:
    """The newest checkpoint that can be used, which a finished run has."""
    latest = checkpoints.latest()
    if latest is None:
        raise CheckpointError(f"{checkpoints.folder}: the run ended without a sound checkpoint")
    return latest


def heldout_course(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """First and last evaluation of a run, by its metrics: those of the sessions before a resume count, too."""
    lines, course = list[str](), [row for row in rows if row.keys() & {"eval/accuracy", "eval/loss"}]
    if not course:
        return lines
    before, after = course[0], course[-1]
    first, last = f"(step {before['step']:.0f})", f"(step {after['step']:.0f})"
    if {"eval/accuracy"} <= before.keys() & after.keys():
        within = ""
        if {"eval/low", "eval/high"} <= after.keys():
            within = f", 95 % interval {after['eval/low']:.2f} to {after['eval/high']:.2f}"
        if "eval/n" in after:
            unit = "pairs" if "eval/brier" in after else "prompts"
            within += f", {of_asked(int(after['eval/n']), int(after.get('eval/asked', after['eval/n'])), unit)}"
        accuracy = f"{before['eval/accuracy']:.2f} {first} -> {after['eval/accuracy']:.2f} {last}"
        lines.append(f"held-out accuracy {accuracy}{within}")
    told = sorted(name for name in before.keys() & after.keys() if name.startswith("eval/reward"))
    for name in told[:1] if len(told) == 2 else told:  # one part alone is the reward
        what = f"part {name.removeprefix(PART)}" if name.startswith(PART) else "reward"
        lines.append(f"held-out {what} {before[name]:.3f} {first} -> {after[name]:.3f} {last}")
    for old, new in zip(measured_words(before), measured_words(after), strict=False):
        lines.append(f"{old} {first} -> {new.removeprefix('held-out ')} {last}")
    return lines


def summary(found: Finished) -> list[str]:
    """What to tell the user at the end."""
    lines = heldout_course([numbers_of(row) for row in read_rows(found.folder / "metrics.jsonl")])
    places = {"model": found.model, "metrics": found.folder / "metrics.jsonl"}
    if (samples := found.folder / "samples").is_dir() and any(samples.iterdir()):
        places["samples"] = samples
    return [*lines, *(f"{name:<8} {place}" for name, place in places.items())]
