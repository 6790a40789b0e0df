"""Where a run can go on: at its newest sound checkpoint, at its beginning, or nowhere until somebody has looked.

Beginning again drops what there is, so it happens by itself only where no checkpoint was ever written. Where there was
one that cannot be read now (damaged, of a newer version, on a disk that is not mounted), the run stops and says so, and
`--restart` begins again beside what it set aside. Nothing here deletes anything.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from stretto.errors import CheckpointError
from stretto.runtime.base_copy import Note
from stretto.storage.atomic import storing
from stretto.storage.checkpoint import Checkpoints
from stretto.storage.json_lines import read_rows, whole

RESTARTED = "before-restart"
"""Folder in a run's folder that holds what was there before it was begun again."""

MADE = (
    "checkpoints",
    "metrics.jsonl",
    "events.jsonl",
    "timeline.json",
    "plan.json",
    "report.html",
    "samples",
    "tensorboard",
    "wandb.txt",
    "trackio.txt",
    "mlflow.txt",
    "inputs.json",
    "base",
)
"""What one course of a run has made, checkpoints first: while they are there, a resume does not begin again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a run goes on."""

    latest: Path | None
    """The newest sound checkpoint; none where the run begins."""
    skipped: tuple[Path, ...]
    """Newer ones, which are damaged; to be set aside when the run goes on."""


def standing(checkpoints: Checkpoints, *, every: int, note: Note = lambda text: None) -> ResumePoint:
    """Where the run of these checkpoints goes on; `every` is how many steps it was to take between two of them.

    CheckpointError, with every reason, where there is or was a checkpoint and none can be read.
    """
    folder, skipped = checkpoints.folder.parent, list[tuple[Path, str]]()
    restart = f"`stretto resume {folder} --restart` begins at step 0 and keeps what is there in {RESTARTED}-001"
    try:
        latest = checkpoints.latest(lambda path, why: skipped.append((path, why)))
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; it may be whole, so nothing was changed\n"
            "    fix: use the version that wrote it, or mend the disk, and resume; to go on from an older checkpoint,\n"
            f"         rename this one to end in .unreadable; {restart}",
            damaged=False,
        ) from error
    if latest is not None:
        for path, why in skipped:
            note(f"skipped {path.name}, which is kept as {path.name}.unreadable: {why}")
        return ResumePoint(latest=latest, skipped=tuple(path for path, _ in skipped))
    reasons = [why for _, why in skipped] or _missing(folder, every)
    if reasons:
        listed = "\n    ".join(reasons)
        raise CheckpointError(
            f"{checkpoints.folder}: no checkpoint can be read, and nothing was changed\n    {listed}\n"
            f"    fix: mount or restore the checkpoints and resume; {restart}"
        )
    return ResumePoint(latest=None, skipped=())


def _missing(folder: Path, every: int) -> list[str]:
    """How the rest of the folder shows that there was a checkpoint; nothing where the run never came that far."""
    with storing(folder):
        steps = [step for step, _ in read_rows(folder / "metrics.jsonl").lines]
        sampled = any((folder / "samples").glob("step-*"))
        events = [row for row in read_rows(folder / "events.jsonl") if row.get("kind") == "checkpoint"]
    if not steps and not sampled:  # then there is nothing that a beginning could drop
        return []
    told = []
    if events:
        last = max(step for row in events if (step := whole(row["step"])) is not None)
        told.append(f"events.jsonl tells of a checkpoint after step {last}, which is not there")
    # A checkpoint is written while the next `every` steps run, and the last of them has its metrics before it waits.
    if max(steps, default=0) > 2 * every:
        told.append(f"metrics.jsonl goes to step {max(steps)}, and a checkpoint was due every {every} steps")
    return told


def set_aside(folder: Path) -> Path:
    """Moves what a run has made to a folder beside it, with its recipe: a run of its own, which can be looked at."""
    number = 1
    while (kept := folder / f"{RESTARTED}-{number:03d}").exists():
        number += 1
    with storing(kept):
        kept.mkdir()
        shutil.copy2(folder / "recipe.yaml", kept)
        for name in MADE:
            if (folder / name).exists() or (folder / name).is_symlink():
                (folder / name).rename(kept / name)
    return kept
