"""Many runs of one recipe: every combination of some values, one after the other or several at once, and what they
came to.

A sweep is a folder with a run for each combination. Whoever calls it again with the same recipe and values goes on with
it: runs that are finished are left alone, and one that was killed goes on from its checkpoint. Several at once are
processes of their own, each with its share of the cores or GPUs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from stretto.api.calls import check, resume, train
from stretto.api.functions import collect
from stretto.api.run import Run
from stretto.errors import Problem, RecipeError, StrettoError
from stretto.recipe.load import Changes, RecipeSource, folder_of, listed, load_recipe
from stretto.recipe.schema import Recipe
from stretto.report.read_run import RunRecord
from stretto.report.sweep_page import SweptRun, page, picture
from stretto.runtime.interrupt import ended_by_signals
from stretto.storage.atomic import replace, to_json
from stretto.storage.lock import is_held
from stretto.storage.run_folder import forget_unbegun

FORMAT = 1
"""Version of sweep.json."""

RECORD = "sweep.json"
"""What says of a folder which sweep it is."""

MOST = 1000
"""Runs of a sweep; more are a slip."""

Grid = Mapping[str, Sequence[Any]]
"""Dotted key -> the values to try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A sweep that has ended; `print` shows its table."""

    folder: Path
    """Where its runs are, with sweep.json and sweep.svg."""
    runs: tuple[Run, ...]
    """A run for each combination, in order; those that failed are left out."""
    settings: tuple[Mapping[str, Any], ...]
    """The values of each of these runs, by key."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """Name of the run -> why it failed."""

    def __str__(self) -> str:
        failed = [f"{name} failed: {why}" for name, why in self.failures.items()]
        return "\n".join([*page(self._swept()), *failed])

    def picture(self) -> str:
        """A curve for each setting, over its seeds, as SVG."""
        return picture(self._swept())

    def _swept(self) -> list[SweptRun]:
        found = zip(self.runs, self.settings, strict=True)
        return [SweptRun(record=RunRecord(run.folder), setting=setting) for run, setting in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """One of the runs."""

    name: str
    folder: Path
    setting: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        with suppress(RecipeError):
            record = RunRecord(self.folder)
            last = self.folder / "checkpoints" / f"step-{record.steps:06d}" / "state" / "manifest.json"
            return record.finished and last.is_file()
        return False

    @property
    def begun(self) -> bool:
        return (self.folder / "recipe.yaml").is_file()


def sweep(
    recipe: RecipeSource,
    grid: Grid,
    *,
    changes: Changes = (),
    folder: str | os.PathLike[str] | None = None,
    at_once: int = 1,
    quiet: bool = False,
    note: Callable[[str], None] | None = None,
    **given: Any,
) -> Sweep:
    """Trains every combination of the values in `grid`, or goes on with a sweep that was stopped.

    `folder` is by default below runs/, and the same for the same recipe and values. `at_once` runs are processes beside
    each other. `given` are the functions that `stretto.train` takes: rewards, environment, algorithm and callbacks.
    """
    told = note or (lambda text: None if quiet else print(text, flush=True))
    base, combinations = load_recipe(recipe, changes), list(_combinations(grid))
    functions = {name: each for name, each in given.items() if name != "callbacks"}
    text = _identity(base, grid, functions, recipe)
    place = _place_of(folder, recipe, text)
    runs = [_Planned(name=name, folder=place / name, setting=setting) for name, setting in _named(combinations)]
    _refuse_wrong(recipe, changes, runs, functions)
    _refuse_processes(recipe, at_once, given)
    _claim(place, text)
    waiting = [run for run in runs if not run.finished]
    told(f"sweep {place}: {len(runs)} runs, {len(runs) - len(waiting)} of them finished")
    failures: dict[str, str] = {}
    processes: list[subprocess.Popen[bytes]] = []

    def work(run: _Planned, share: Mapping[str, str]) -> None:
        _wait_for_another(run, told)
        if run.finished:
            return
        told(f"{run.name}: {'goes on' if run.begun else 'begins'} ({runs.index(run) + 1} of {len(runs)})")
        try:
            if at_once > 1:
                _process(run, recipe, listed(changes), share, processes)
            else:
                _here(run, recipe, listed(changes), quiet, given)
        except StrettoError as error:
            failures[run.name] = str(error)
            told(f"{run.name} failed: {error}")

    try:
        with ended_by_signals():
            _work_through(waiting, work, at_once, processes)
    except KeyboardInterrupt:
        told(f"stopped; the same command goes on with {place}")
        raise
    done = [run for run in runs if run.begun and run.name not in failures]
    result = Sweep(
        folder=place,
        runs=tuple(Run(run.folder) for run in done),
        settings=tuple(run.setting for run in done),
        failures=failures,
    )
    if done:
        replace(place / "sweep.svg", [result.picture()])
    return result


def _wait_for_another(run: _Planned, told: Callable[[str], None]) -> None:
    """Returns when no other process trains the run, which a sweep that was killed may have left."""
    if is_held(run.folder):
        told(f"{run.name}: trains already, in a process of a sweep that was killed; waiting for that")
    while is_held(run.folder):
        time.sleep(1.0)


def _identity(base: Recipe, grid: Grid, functions: Mapping[str, Any], recipe: RecipeSource) -> str:
    """What a sweep is, as sweep.json has it: the recipe, the values, and what functions that are given as objects make
    of the recipe, with the source of those that have no name."""
    told: dict[str, Any] = {"format": FORMAT, "recipe": base.model_dump(mode="json")}
    told["grid"] = {key: list(values) for key, values in grid.items()}
    if functions:
        found, own = collect(**functions, root=folder_of(recipe))
        told |= {"given": own, "sources": found.sources(found.kinds)}
    return to_json(told, indent=1) + "\n"


def _combinations(grid: Grid) -> Iterator[dict[str, Any]]:
    """Every combination, the last key changing first."""
    if not grid or any(isinstance(values, str) or not list(values) for values in grid.values()):
        raise RecipeError.of("grid", "names no values to try", "give keys with lists of values")
    if (count := _product(len(list(values)) for values in grid.values())) > MOST:
        raise RecipeError.of("grid", f"asks for {count:,} runs", f"use {MOST} or fewer")
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _product(numbers: Iterator[int]) -> int:
    total = 1
    for number in numbers:
        total *= number
    return total


def _named(combinations: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each with a name that a folder can have: `lr=0.0001,seed=2`."""
    keys = list(combinations[0])
    last = [key.rpartition(".")[2] for key in keys]
    short = {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}
    seen: set[str] = set()
    for number, setting in enumerate(combinations):
        told = ",".join(f"{short[key]}={value}" for key, value in setting.items())
        name = re.sub(r"[^A-Za-z0-9._=,+-]", "_", told)[:100]
        name = name if name not in seen else f"{name}-{number}"
        seen.add(name)
        yield name, setting


def _place_of(folder: str | os.PathLike[str] | None, recipe: RecipeSource, text: str) -> Path:
    """The folder of the sweep that this text says; RecipeError if it holds another sweep, or something else."""
    stem = Path(recipe).stem if isinstance(recipe, str | os.PathLike) else "run"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    place = Path(folder) if folder is not None else Path("runs") / f"{stem}-sweep-{digest}"
    record = place / RECORD
    if record.is_file():
        if record.read_text(encoding="utf-8") != text:
            fix = "name another folder, or put recipe and values back"
            raise RecipeError.of("folder", f"{place} holds a sweep of another recipe or other values", fix)
    elif place.is_dir() and any(place.iterdir()):
        raise RecipeError.of("folder", f"{place} exists already and is no sweep", "name another folder")
    return place


def _claim(place: Path, text: str) -> None:
    """Makes the folder, once nothing is wrong: what was refused must not stand in the way of what is meant."""
    if (place / RECORD).is_file():
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "choose a folder that you may write to"
        raise RecipeError.of("folder", f"{place} cannot be made ({error.strerror})", fix) from error
    replace(place / RECORD, [text])


def _refuse_wrong(recipe: RecipeSource, changes: Changes, runs: Sequence[_Planned], given: Mapping[str, Any]) -> None:
    """Everything wrong with any of the recipes, before the first begins."""
    problems: dict[Problem, None] = {}
    for run in runs:
        if not run.begun:
            found = check(recipe, changes=[*listed(changes), dict(run.setting)], **given)
            problems |= dict.fromkeys(found)
    if problems:
        raise RecipeError(*problems)


def _refuse_processes(recipe: RecipeSource, at_once: int, given: Mapping[str, Any]) -> None:
    """What processes of their own could not be told."""
    if at_once > 1 and (given or not isinstance(recipe, str | os.PathLike)):
        raise RecipeError.of("at_once", "needs a recipe in a file and no functions given as objects", "use at_once=1")


def _work_through(
    runs: Sequence[_Planned],
    work: Callable[[_Planned, Mapping[str, str]], None],
    at_once: int,
    processes: Sequence[subprocess.Popen[bytes]],
) -> None:
    """One after the other, or each as soon as one before it has ended. Ctrl-C is passed on to `processes`."""
    if at_once <= 1:
        for run in runs:
            work(run, {})
        return
    shares: SimpleQueue[dict[str, str]] = SimpleQueue()
    for share in shares_of_machine(at_once):
        shares.put(share)

    def one(run: _Planned) -> None:
        share = shares.get()
        try:
            work(run, share)
        finally:
            shares.put(share)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            for done in [pool.submit(one, run) for run in runs]:
                done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.send_signal(signal.SIGINT)  # does nothing to one that has ended
            raise


def shares_of_machine(count: int) -> list[dict[str, str]]:
    """What each of so many processes is told by its environment: its GPUs, or its number of threads."""
    from stretto.checks.machine.facts import cores, look

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(index) for index in range(len(look().gpus))]
    if not gpus:
        return [{"OMP_NUM_THREADS": str(max(1, cores() // count))} for _ in range(count)]
    if len(gpus) < count:
        raise RecipeError.of("at_once", f"asks for {count} runs at once on {len(gpus)} GPUs", f"use {len(gpus)}")
    size = len(gpus) // count
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * size : (i + 1) * size])} for i in range(count)]


def _here(run: _Planned, recipe: RecipeSource, changes: Sequence[Any], quiet: bool, given: Mapping[str, Any]) -> None:
    """Trains in this process."""
    if run.begun:
        resume(run.folder, quiet=quiet, **given)
        return
    if run.folder.is_dir():
        forget_unbegun(run.folder)
    train(recipe, changes=[*changes, dict(run.setting)], folder=run.folder, quiet=quiet, **given)


def _process(
    run: _Planned,
    recipe: Any,
    changes: Sequence[Any],
    share: Mapping[str, str],
    processes: list[subprocess.Popen[bytes]],
) -> None:
    """Trains in a process of its own, whose output is kept beside the run."""
    if run.begun:
        arguments = ["resume", os.fspath(run.folder)]
    else:
        if run.folder.is_dir():
            forget_unbegun(run.folder)
        texts = [change for change in changes if isinstance(change, str)]
        pairs = [pair for change in changes if isinstance(change, Mapping) for pair in change.items()]
        pairs += [*run.setting.items(), ("run.folder", os.fspath(run.folder))]
        arguments = ["train", os.fspath(recipe), *texts, *(f"{key}={json.dumps(value)}" for key, value in pairs)]
    log = run.folder.with_name(f"{run.name}.log")
    with open(log, "ab") as output:
        command = [sys.executable, "-m", "stretto", *arguments]
        # In a session of its own, so that a Ctrl-C in the terminal reaches it once, from here.
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | dict(share), start_new_session=True
        )
        processes.append(process)
        code = process.wait()
    if code:
        raise StrettoError(f"exit code {code}; {log} says why")
