"""The one place that opens a checkpoint for readers: eval, sample, serve, merge, export, push, chat and replay.

A reader needs no lock on the run, so the run may train on and remove old checkpoints meanwhile. A checkpoint that is
read is leased, which keeps the trainer of the same version from removing it. Where it vanished all the same (before the
lease, on a file system without locks, by hand), the choice is made again among the checkpoints that are there then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from stretto.errors import CheckpointError, RecipeError
from stretto.recipe.schema import Recipe
from stretto.runtime.base_copy import Note
from stretto.storage.checkpoint import Checkpoints, leased, none_yet, step_of
from stretto.storage.manifest import verify

T = TypeVar("T")

NEWEST, BEST = "newest", "best"
"""Names of checkpoints, next to their steps."""

TRIES = 8
"""Choices of a checkpoint before a reader gives up."""


def read_checkpoint(
    folder: Path,
    recipe: Recipe,
    use: Callable[[Path], T],
    *,
    which: str = NEWEST,
    before: int | None = None,
    otherwise: Callable[[], T] | None = None,
    note: Note = lambda text: None,
) -> T:
    """Call `use` with a valid checkpoint of a run and return its result; again with another one if that vanished.

    `which` is newest, best or a step; `before` limits newest to earlier steps. Where no checkpoint qualifies,
    `otherwise` is called; unset, that is a CheckpointError.
    """
    checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.checkpoint.keep, best=recipe.checkpoint.best)
    for _ in range(TRIES):
        there, skipped = checkpoints.newest(), list[tuple[Path, str]]()
        chosen = None if there is None else checkpoints.folder / f"step-{there:06d}"
        with ExitStack() as lease:
            try:
                found = _chosen(checkpoints, which, before, lease, skipped)
                if not all(os.path.lexists(path) for path, _ in skipped):
                    continue
                for path, why in skipped:
                    note(f"skipped {path.name}: {why}")
                if found is not None:
                    chosen = found
                    return use(found)
                if otherwise is None:
                    raise none_yet(folder)
            except Exception:
                if chosen is None or os.path.lexists(chosen):
                    raise
                continue
        return otherwise()
    reason = f"{checkpoints.folder}: the run removed each of {TRIES} checkpoints while it was read"
    raise CheckpointError(f"{reason}\n    fix: try again when the run has ended, or raise its checkpoint.keep")


def _chosen(
    checkpoints: Checkpoints,
    which: str,
    before: int | None,
    lease: ExitStack,
    skipped: list[tuple[Path, str]],
) -> Path | None:
    """The folder of a valid checkpoint, leased; `None` where there is no newest one."""
    if which == NEWEST:
        return checkpoints.latest(lambda path, why: skipped.append((path, why)), before=before, lease=lease)
    run = checkpoints.folder.parent
    if which == BEST:
        found = checkpoints.best()
        if found is None:
            reason = f"{run}: no checkpoint has the metric that checkpoint.best names"
            raise CheckpointError(f"{reason}\n    fix: --step newest, or the number of one")
    elif which.isascii() and which.isdigit():
        found = checkpoints.folder / f"step-{int(which):06d}"
    else:
        raise RecipeError.of("--step", f"{which!r} is no step", "give the number of a checkpoint, newest or best")
    lease.enter_context(leased(found))
    if not found.is_dir():
        there = ", ".join(sorted(str(step_of(path)) for path in checkpoints.folder.glob("step-*[0-9]"))) or "none"
        raise RecipeError.of("--step", f"{run} holds no checkpoint of step {which}", f"those that it holds: {there}")
    verify(found)
    return found
