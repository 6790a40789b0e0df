"""How a run ends: what it came to, what is shown of that at last, and which command goes on from there.

A finished run says that it is finished, also when it is resumed for nothing. One that was asked to end says where it
stands, once, as the message of the `RunStopped` that ends it. Files are only looked at here.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import CheckpointError
from stretto.recipe.schema import Recipe
from stretto.report.console import Progress
from stretto.runtime.evaluate import Evaluation, measured_words
from stretto.runtime.inputs import allowed_before
from stretto.runtime.recipe_changes import as_arguments
from stretto.runtime.recipe_file import load_run_recipe
from stretto.storage.checkpoint import Checkpoints


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
    folder: Path,
    model: Path,
    steps: int,
    evaluations: Sequence[tuple[int, Evaluation]] = (),
    beside: Sequence[str] = (),
) -> Finished:
    """What a run of so many steps came to, which is shown with the lines `beside` it and how it could go further."""
    found = Finished(folder=folder, model=model, evaluations=tuple(evaluations))
    more = f"stretto resume {shlex.quote(str(folder))} run.steps={2 * steps} --allow run.steps"
    told = f"finished: {steps} of {steps} steps; go further with: {more}"
    screen.finish([*summary(found), *beside, "", told])
    return found


def where_it_stands(checkpoints: Checkpoints, steps: int, asked: Sequence[str] = ()) -> str:
    """What a run that was asked to end says last; `asked` is what its resume was to change and has not written down."""
    folder, newest = checkpoints.folder.parent, checkpoints.newest()
    if not (folder / "recipe.yaml").exists():
        return "stopped before anything was begun"
    where = "before a checkpoint; begin again" if newest is None else f"after step {newest} of {steps}; go on"
    return f"stopped {where} with: {shlex.join(['stretto', 'resume', str(folder), *asked])}"


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


def summary(found: Finished) -> list[str]:
    """What to tell the user at the end."""
    lines = []
    if found.evaluations:
        (first, before), (last, after) = found.evaluations[0], found.evaluations[-1]
        if before.accuracy is not None and after.accuracy is not None and after.interval is not None:
            low, high = after.interval
            lines.append(
                f"held-out accuracy {before.accuracy:.2f} (step {first}) -> {after.accuracy:.2f} (step {last}), "
                f"95 % interval {low:.2f} to {high:.2f}, {after.prompts}"
            )
        for old, new in zip(measured_words(before), measured_words(after), strict=True):
            lines.append(f"{old} (step {first}) -> {new.removeprefix('held-out ')} (step {last})")
    places = {"model": found.model, "metrics": found.folder / "metrics.jsonl"}
    if (samples := found.folder / "samples").is_dir() and any(samples.iterdir()):
        places["samples"] = samples
    return [*lines, *(f"{name:<8} {place}" for name, place in places.items())]
