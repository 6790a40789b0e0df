"""The run folder while a run writes it: recipe, plan, metrics, samples, events and timeline.

It decides where and in which form things are kept, not what is worth keeping: numbers and rows come from the loop.
Checkpoints live in the same folder but belong to `storage.checkpoint`. Lines reach the operating system as they are
made, so a killed process loses none; a line that a crash tore is dropped when the journal is reopened. `sync` forces
them to the medium, so a power cut loses no line of a step that has a checkpoint.

Write a step's metrics before its checkpoint: on resume, what is later than the checkpoint is dropped and made again.
A process that lost the run's lock writes nothing here (`lock.still_held`).
"""

from __future__ import annotations

import math
import numbers
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self

from stretto.errors import RecipeError, StrettoError
from stretto.storage import lock
from stretto.storage.atomic import Disk, replace, storing, to_json, unused, write_all
from stretto.storage.json_lines import read_rows, step_ranges
from stretto.storage.manifest import NUMBERED
from stretto.storage.trace import TraceFile

SAMPLES = re.compile(r"(?:step|eval)-(\d{6,})\.jsonl")
"""Answers that a step trained on, and held-out answers of the evaluation after a step."""

BEFORE_THE_FIRST_STEP = frozenset(
    (
        "recipe.yaml",
        "plan.json",
        "events.jsonl",
        "timeline.json",
        "samples",
        "tensorboard",
        "base",
        ".base.draft",
        "inputs.json",
        "vstar.jsonl",
        lock.NAME,
    )
)
"""What a run's folder holds before there is a result in it: `base` is made again from the recipe."""


class Sink(Protocol):
    """Another place that what a run finds goes to."""

    def recipe(self, keys: Mapping[str, Any]) -> None:
        """Takes the recipe, by dotted names, when the run begins or goes on."""
        ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes the answers of one step."""
        ...

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """Takes the numbers of one step."""
        ...

    def close(self) -> None:
        """Flushes and closes."""
        ...


class Journal:
    """A run folder open for writing. Make one with `create` or `reopen`, close it or use it in a `with`."""

    def __init__(self, folder: Path, trace: TraceFile, *, step: int, sinks: Sequence[Sink]) -> None:
        self.folder = folder
        self._trace = trace
        self._step = step
        self._sinks = tuple(sinks)
        self._sampled: SimpleQueue[Path] = SimpleQueue()  # files of samples that `sync` has not forced to the medium
        with storing(folder):
            (folder / "samples").mkdir(exist_ok=True)

    @classmethod
    def create(cls, folder: Path, *, recipe: str, plan: Mapping[str, Any], sinks: Sequence[Sink] = ()) -> Journal:
        """Starts a run's folder with its resolved recipe (YAML text) and its plan."""
        if (folder / "recipe.yaml").exists():
            raise _taken(folder)
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        replace(folder / "recipe.yaml", [recipe])
        replace(folder / "plan.json", [to_json(plan, indent=2), "\n"])
        journal = cls(folder, TraceFile(folder / "timeline.json"), step=-1, sinks=sinks)
        journal.event("started", step=0)
        return journal

    @classmethod
    def reopen(
        cls,
        folder: Path,
        *,
        step: int,
        again: bool = False,
        sinks: Sequence[Sink] = (),
        note: Callable[[str], None] = lambda text: None,
    ) -> Journal:
        """Goes on after `step`: whatever is later, and any line that a crash tore, is dropped.

        With `again` the metrics of `step` itself are dropped too, because they will be written again. Steps without
        metrics, and checkpoints without an event, are noted: the files were cut.
        """
        steps = _truncate(folder / "metrics.jsonl", step - again, note)
        if missing := step_ranges(set(range(1, step + 1 - again)) - steps):
            note(f"metrics.jsonl lacks {missing}: lines were cut off or lost; the run continues without them")
        _truncate(folder / "events.jsonl", step, note)
        if step and (missing := _unrecorded(folder, step)):
            note(f"events.jsonl lacks {missing}: lines were cut off or lost; the run continues without them")
        for path in (folder / "samples").glob("*.jsonl"):
            match = SAMPLES.fullmatch(path.name)
            if match and int(match[1]) > step:
                with storing(path):
                    path.unlink()
        trace = TraceFile.reopen(folder / "timeline.json", step=step, again=again)
        journal = cls(folder, trace, step=step, sinks=sinks)
        journal.event("resumed", step=step)
        return journal

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the step's line: `step` first, then the numbers by name; those that are not finite as null."""
        plain = {key: _number(values[key]) for key in sorted(values)}
        self._append("metrics.jsonl", {"step": step, **plain})
        for sink in self._sinks:
            sink.metrics(step, plain)
        self._step = step

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the step's trajectories, one line each, all or none."""
        self._write_rows(f"step-{step:06d}.jsonl", rows)
        for sink in self._sinks:
            sink.samples(step, rows)

    def held_out(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the held-out answers of the evaluation after a step, one line each, all or none."""
        self._write_rows(f"eval-{step:06d}.jsonl", rows)

    def event(self, kind: str, **fields: Any) -> None:
        """Notes something that happened, with the time; of the step under way unless `step` says otherwise."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._append("events.jsonl", {"time": now, "kind": kind, "step": self._step + 1, **fields})

    def timeline(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Adds Chrome-trace events (`report.timeline.to_events`) to timeline.json."""
        lock.still_held(self.folder)
        self._trace.append(events)

    def sync(self, disk: Disk) -> None:
        """Returns when metrics, events and samples that were written so far are on the medium."""
        written = [self.folder / "metrics.jsonl", self.folder / "events.jsonl"]
        while not self._sampled.empty():
            written.append(self._sampled.get())
        for path in (*written, self.folder / "samples", self.folder):
            with storing(path):
                if path.exists():  # a user may remove samples while the run trains
                    disk.sync(path)

    def close(self) -> None:
        """Closes the sinks; the files are closed after every write."""
        for sink in self._sinks:
            sink.close()

    def _write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lock.still_held(self.folder)
        path = self.folder / "samples" / name
        replace(path, (to_json(row) + "\n" for row in rows))
        self._sampled.put(path)

    def _append(self, name: str, values: Mapping[str, Any]) -> None:
        lock.still_held(self.folder)
        path = self.folder / name
        with storing(path), path.open("ab", buffering=0) as file:
            write_all(file.fileno(), to_json(values).encode("ascii") + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(*(() if error is None else (StrettoError,))):  # what ended the run is what to tell
            self.close()


def free_folder(recipe_name: str, root: Path) -> Path:
    """Makes `root`/<recipe>-<NNN> with the number after the highest one there, safe against others who do the same."""
    with _making(root):
        root.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(re.escape(recipe_name) + r"-(\d+)")
    number = max((int(match[1]) for path in root.iterdir() if (match := pattern.fullmatch(path.name))), default=0)
    while True:
        number += 1
        folder = root / f"{recipe_name}-{number:03d}"
        with suppress(FileExistsError), _making(folder):
            folder.mkdir()
            return folder


def claim_folder(folder: Path) -> Path:
    """Makes the folder that a recipe names; one that exists is refused, so that no run is written over."""
    with _making(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _making(folder):
            folder.mkdir()
    except FileExistsError as error:
        raise _taken(folder) from error
    return folder


def forget_unbegun(folder: Path) -> None:
    """Removes a run's folder if the run never began, so that the same recipe can be tried again with it.

    It stays when it holds anything but what is made before the first step, such as a metric, a checkpoint or a stack.
    """
    kept = [path for path in folder.glob("*") if path.name not in BEFORE_THE_FIRST_STEP]
    if not kept and not any((folder / "samples").glob("*")):
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _making(folder: Path) -> Iterator[None]:
    """Turns a folder that cannot be made into a problem of the recipe; that one exists is for the caller to judge."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileExistsError) and folder.is_dir():
            raise
        raise RecipeError.of(
            "run.folder", f"{folder} cannot be made ({error.strerror})", "choose a folder that you may write to"
        ) from error


def _taken(folder: Path) -> RecipeError:
    return RecipeError.of(
        "run.folder",
        f"{folder} exists already",
        f"name another folder, leave it at auto, or continue that run with `stretto resume {folder}`",
    )


def _number(value: Any) -> float | None:
    """A plain number: counts stay whole, what is not finite becomes none."""
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _unrecorded(folder: Path, step: int) -> str:
    """The start of the run and the checkpoints before `step` that events.jsonl does not hold, in words.

    A kill may come between the checkpoint of `step` and its event, so that one may be missing.
    """
    rows = list(read_rows(folder / "events.jsonl"))
    told = {row["step"] for row in rows if row.get("kind") == "checkpoint"}
    found = (NUMBERED.fullmatch(path.name) for path in (folder / "checkpoints").glob("step-*"))
    kept = step_ranges({number for match in found if match and (number := int(match[1])) < step} - told)
    started = any(row.get("kind") == "started" for row in rows)
    return " and ".join(["the start of the run"] * (not started) + [f"checkpoint events of {kept}"] * bool(kept))


def _truncate(path: Path, step: int, note: Callable[[str], None]) -> set[int]:
    """Keeps the whole lines up to `step` and returns their steps; a file with damaged ones is kept beside it."""
    with storing(path):
        rows = read_rows(path)
        if rows.damaged:
            kept = unused(path.with_name(f"{path.name}.unreadable"))
            shutil.copy2(path, kept)
            note(f"{path.name}: damaged lines were left out ({rows.damaged}); all of it is in {kept.name}")
    lines = [(at, line) for at, line in rows.lines if at <= step]
    replace(path, [line + "\n" for _, line in lines])
    return {at for at, _ in lines}
