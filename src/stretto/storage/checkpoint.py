"""A crash-proof store of checkpoints: RUN/checkpoints/step-NNNNNN, one per step boundary.

A checkpoint is a folder that `transformers` or PEFT loads as a model, plus state/ with what a resume needs. It is
filled under a hidden name, forced to the medium and only then renamed, so a visible folder was complete when it got its
name; what happened to it afterwards is found by `storage.manifest`. Whether there is room is for the caller to guard.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stretto.errors import CheckpointError
from stretto.storage import manifest as manifests
from stretto.storage.atomic import Disk, share, storing, to_json, unused
from stretto.storage.lock import BUSY
from stretto.storage.manifest import STATE
from stretto.storage.pass_rates import shown
from stretto.storage.tensors import read_state, write_tensors, write_values
from stretto.types import Stateful

FOLDER = manifests.NUMBERED
PART = re.compile(r"[A-Za-z0-9_-]+")
DROPPED = {"engine"}
"""Parts that checkpoints of older versions hold and nothing needs any more."""

REPLACED = ".replaced"
"""How the hidden name of a checkpoint ends while another one of the same step takes its place."""

LESS = ("loss", "kl", "eval/loss", "eval/brier", "eval/ece")
"""How metrics begin of which less is better."""

Skipped = Callable[[Path, str], None]
"""Told of a checkpoint that cannot be used, and why."""


class NamedState(Protocol):
    """What a checkpoint takes from a part of a run."""

    @property
    def name(self) -> str:
        """What its files are called."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Plain values and tensors."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSnapshot:
    """The state of a part as it was when a checkpoint was begun; what the part does meanwhile does not change it."""

    name: str
    """The part's."""
    values: Mapping[str, Any]
    """Its state."""

    def state(self) -> Mapping[str, Any]:
        """As the part would have told it then."""
        return self.values


class Checkpoints:
    """Saves and restores; keeps the last `keep` checkpoints and the best one by the metric `best`."""

    def __init__(self, folder: Path, *, keep: int, best: str | None, disk: Disk | None = None) -> None:
        self.folder = folder
        self._keep = keep
        self._best = best
        self.disk = disk or Disk()
        self._current: int | None = None

    def save(
        self,
        step: int,
        *,
        parts: Sequence[NamedState],
        write_model: Callable[[Path], None],
        metrics: Mapping[str, float],
        written: Sequence[str] = (),
        hashes: Mapping[str, str] | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> Path:
        """Stores the run as it is after `step` and returns the folder.

        Of parts that are `written` elsewhere, by those who hold them, `write_model` brings the files, too; `hashes` are
        the XXH3 of those of its files that need not be read again for it.

        Folders of this and later steps that were there before belong to a course of the run that was given up, and are
        removed; only the step that this store just saved or restored is not written again, unless its metrics changed.
        `ready` is called before the new one gets its name: what it writes is there wherever the checkpoint is.
        """
        target = self.folder / f"step-{step:06d}"
        draft = self.folder / f".{target.name}.partial"
        with storing(target, CheckpointError):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
            if not self.has(step, metrics):
                draft.mkdir()
                try:
                    self._fill(draft, step, parts, written, write_model, metrics, hashes)
                    ready()
                except BaseException:
                    with suppress(OSError):  # a full disk needs the room back at once
                        self.disk.remove(draft)
                    raise
                replaced = self._hidden(target, REPLACED) if os.path.lexists(target) else None
                self.disk.rename(draft, target)
                self.disk.sync(self.folder)
                if replaced is not None:
                    self.disk.remove(replaced)
            self._current = step
            self._retain(step)
        return target

    def has(self, step: int, metrics: Mapping[str, float]) -> bool:
        """True if this store has just saved or restored the step, with these metrics, and it still verifies."""
        return step == self._current and self._holds(self.folder / f"step-{step:06d}", metrics)

    def newest(self) -> int | None:
        """The step of the newest checkpoint, by its name alone."""
        return max((step for step, _ in self._folders()), default=None)

    def latest(
        self, skipped: Skipped | None = None, *, before: int | None = None, lease: ExitStack | None = None
    ) -> Path | None:
        """The newest checkpoint that verifies, of those `before` a step if one is given; `skipped` hears of every newer
        one that is damaged. A reader that gives a `lease` has the checkpoint `leased` within it.

        One that may be whole, though this version or this moment cannot read it, is not skipped: a CheckpointError.
        """
        for step, path in reversed(self._folders()):
            if before is not None and step >= before:
                continue
            with ExitStack() as reading:
                if lease is not None:
                    reading.enter_context(leased(path))
                try:
                    manifests.verify(path)
                except CheckpointError as error:
                    if not error.damaged:
                        raise
                    if skipped:
                        skipped(path, str(error))
                    continue
                if lease is not None:
                    lease.push(reading.pop_all())
                return path
        return None

    def set_aside(self, *paths: Path) -> None:
        """Takes checkpoints that cannot be read out of the way, and keeps them."""
        for path in paths:
            with storing(path, CheckpointError):
                self.disk.rename(path, unused(path.with_name(f"{path.name}.unreadable")))

    def best(self) -> Path | None:
        """The checkpoint with the best value of the metric; the earlier one if two are equal."""
        return self._best_of(self._folders())

    def restore(self, path: Path, parts: Sequence[Stateful], *, written: Sequence[str] = ()) -> int:
        """Puts every part back as the checkpoint holds it and returns its step; if anything is amiss, none.

        Parts that were `written` by those who hold them are read by them, and must only be there.
        """
        manifest = manifests.verify(path)
        wanted = {*(part.name for part in parts), *written}
        for name in sorted(wanted - set(manifest.parts)):
            raise CheckpointError(f"{path}: holds no state of {name}, which this run needs")
        for name in sorted(set(manifest.parts) - wanted - DROPPED):
            raise CheckpointError(f"{path}: holds state of {name}, which this run does not have")
        states = [read_state(*_files(path, part.name)) for part in parts]
        for part, state in zip(parts, states, strict=True):
            part.restore(state)
        self._current = manifest.step
        return manifest.step

    @staticmethod
    def restore_part(path: Path, part: Stateful) -> None:
        """Puts one part back, for those who need no other."""
        part.restore(read_state(*_files(path, part.name)))

    def _fill(
        self,
        draft: Path,
        step: int,
        parts: Sequence[NamedState],
        written: Sequence[str],
        write_model: Callable[[Path], None],
        metrics: Mapping[str, float],
        hashes: Mapping[str, str] | None,
    ) -> None:
        """Everything a checkpoint holds, the manifest last, and all of it on the medium."""
        names = (*(part.name for part in parts), *written)
        if len(set(names)) < len(names) or not all(PART.fullmatch(name) for name in names):
            raise CheckpointError(f"parts must have different plain names, not {', '.join(names)}")
        self.disk.write(draft, write_model)
        (draft / STATE).mkdir(exist_ok=True)
        for part in parts:
            self._write_part(draft, part)
        share(draft)
        listed = manifests.describe(draft, step=step, metrics=metrics, parts=names, hashes=hashes)
        self.disk.write(draft / STATE / "manifest.json", lambda path: manifests.write(path, listed))
        for path in sorted(draft.rglob("*"), reverse=True):
            self.disk.sync(path)
        self.disk.sync(draft)

    def _write_part(self, draft: Path, part: NamedState) -> None:
        values, tensors = _files(draft, part.name)
        found: dict[str, Any] = {}
        self.disk.write(values, lambda path: found.update(write_values(path, part.state())))
        if found:
            self.disk.write(tensors, lambda path: write_tensors(path, found))

    def _holds(self, path: Path, metrics: Mapping[str, float]) -> bool:
        try:
            return manifests.verify(path).metrics == json.loads(to_json(dict(metrics)))
        except CheckpointError:
            return False

    def _folders(self) -> list[tuple[int, Path]]:
        """Whatever has the name of a checkpoint, with its step, oldest first."""
        try:
            found = [(FOLDER.fullmatch(path.name), path) for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:  # that is not the same as being empty
            raise CheckpointError(f"{self.folder}: cannot be read ({error.strerror})", damaged=False) from error
        return sorted((int(match[1]), path) for match, path in found if match)

    def recover(self) -> None:
        """Gives back its name to what was being replaced when a process was killed; for whoever owns the run."""
        for path in self.folder.glob(f".step-*{REPLACED}"):
            target = self.folder / path.name.removeprefix(".").removesuffix(REPLACED)
            with storing(target, CheckpointError):
                if not os.path.lexists(target):
                    self.disk.rename(path, target)

    def _tidy(self) -> None:
        """Removes what a killed process left half-written or half-removed."""
        self.recover()
        for path in self.folder.glob(".step-*"):
            self.disk.remove(path)

    def _retain(self, step: int) -> None:
        """Keep the newest checkpoints up to `step`, the best, and each one that a reader holds a lease on."""
        folders = self._folders()
        current = [item for item in folders if item[0] <= step]
        kept = {path for _, path in current[-self._keep :]} | {self._best_of(current)}
        for number, path in folders:
            if path not in kept and not (number <= step and is_leased(path)):
                self._discard(path)

    def _discard(self, path: Path) -> None:
        """Takes the name away first, so that a kill half-way leaves nothing that looks like a checkpoint.

        What cannot be read is no old checkpoint of this run that is done with, so it is not removed.
        """
        if (hidden := self._hidden(path, ".removed")) is not None:
            self.disk.remove(hidden)

    def _hidden(self, path: Path, how: str) -> Path | None:
        """Where a checkpoint is once its name is free; none if it cannot be read and so was set aside."""
        try:
            manifests.read(path)
        except CheckpointError:
            self.set_aside(path)
            return None
        hidden = path.with_name(f".{path.name}{how}")
        self.disk.rename(path, hidden)
        return hidden

    def _best_of(self, folders: Sequence[tuple[int, Path]]) -> Path | None:
        scores = {path: self._score(path) for _, path in folders}
        usable = {path: score for path, score in scores.items() if score is not None}
        return max(usable, key=lambda path: usable[path]) if usable else None

    def _score(self, path: Path) -> float | None:
        """What the metric has shown, turned so that higher is better; none if there is no number to compare."""
        if self._best is None:
            return None
        with suppress(CheckpointError):
            value = shown(metrics_of(path), self._best)
            if value is not None and not math.isnan(value):
                return -value if self._best.startswith(LESS) else value
        return None


@contextmanager
def leased(path: Path) -> Iterator[None]:
    """Within it, the run does not remove this checkpoint as an old one; without effect where files have no locks.

    A shared lock on the manifest, which ends with the reader however it ends.
    """
    try:
        handle = os.open(path / STATE / "manifest.json", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # a file that cannot be opened is for the verification to tell
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def is_leased(path: Path) -> bool:
    """True if a process reads this checkpoint within `leased`."""
    try:
        handle = os.open(path / STATE / "manifest.json", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in BUSY
    else:
        return False
    finally:
        os.close(handle)


def none_yet(run: Path) -> CheckpointError:
    """What to raise where the model of a run is asked for, and no checkpoint has one."""
    fix = f"`stretto resume {run}` goes on until there is one (checkpoint.every), or says what is wrong"
    return CheckpointError(f"{run}: this run has no sound checkpoint yet\n    fix: {fix}")


def step_of(path: Path) -> int:
    """The step after which a checkpoint was written, from its name."""
    match = FOLDER.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path}: is not a checkpoint, whose name would be step-NNNNNN")
    return int(match[1])


def metrics_of(path: Path) -> dict[str, float]:
    """The metrics that a checkpoint was written with."""
    return {name: math.nan if value is None else value for name, value in manifests.read(path).metrics.items()}


def _files(folder: Path, part: str) -> tuple[Path, Path]:
    """Where the plain values and the tensors of a part are kept."""
    return folder / STATE / f"{part}.json", folder / STATE / f"{part}.safetensors"
