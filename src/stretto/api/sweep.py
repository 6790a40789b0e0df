"""Many runs of one recipe: every combination of some values, one after the other or several at once, and what they
came to.

A sweep is a folder with a run for each combination. Whoever calls it again with the same recipe and values goes on with
it: runs that are finished are left alone, and one that was killed goes on from its checkpoint. Several at once are
processes of their own, each with its share of the cores or GPUs.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from stretto.api.calls import check
from stretto.api.functions import RewardLike, collect
from stretto.api.run import Run
from stretto.api.sweep_runs import GridRun, SweepWork
from stretto.environments.base import Environment
from stretto.errors import Problem, RecipeError
from stretto.recipe.load import Changes, RecipeSource, folder_of, listed, load_recipe, plain
from stretto.recipe.schema import Recipe
from stretto.report.read_run import RunRecord
from stretto.report.sweep_page import SweptRun, page, picture
from stretto.runtime.interrupt import ended_by_signals
from stretto.runtime.user_functions import Callback
from stretto.storage.atomic import replace, to_json

FORMAT = 1
"""Version of sweep.json."""

RECORD = "sweep.json"
"""What says of a folder which sweep it is."""

MOST = 1000
"""Runs of a sweep; more are a slip."""

Grid = Mapping[str, Iterable[Any]]
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


def sweep(
    recipe: RecipeSource,
    grid: Grid,
    *,
    rewards: Sequence[RewardLike] | None = None,
    environment: Environment | str | None = None,
    algorithm: Callable[..., Any] | str | None = None,
    callbacks: Sequence[Callback] = (),
    changes: Changes = (),
    folder: str | os.PathLike[str] | None = None,
    at_once: int = 1,
    quiet: bool = False,
    note: Callable[[str], None] | None = None,
) -> Sweep:
    """Trains every combination of the values in `grid`, or goes on with a sweep that was stopped.

    `folder` is by default below runs/, and the same for the same recipe and values. `at_once` runs are processes beside
    each other. The functions are those that `stretto.train` takes.
    """
    told = note or (lambda text: None if quiet else print(text, flush=True))
    changes, values = listed(changes), _values(grid)
    base, combinations = load_recipe(recipe, changes), list(_combinations(values))
    asked = {"rewards": rewards, "environment": environment, "algorithm": algorithm}
    functions: dict[str, Any] = {name: each for name, each in asked.items() if each is not None}
    text = _identity(base, values, functions, recipe)
    place = _place_of(folder, recipe, text)
    runs = [GridRun(name=name, folder=place / name, setting=setting) for name, setting in _named(combinations)]
    _refuse_wrong(recipe, changes, runs, functions)
    given = functions | ({"callbacks": callbacks} if callbacks else {})
    _refuse_processes(recipe, at_once, given)
    _claim(place, text)
    told(f"sweep {place}: {len(runs)} runs, {sum(run.finished for run in runs)} of them finished")
    work = SweepWork(recipe=recipe, changes=changes, given=given, at_once=at_once, quiet=quiet, told=told)
    try:
        with ended_by_signals():
            work.through(runs)
    except KeyboardInterrupt:
        told(f"stopped; the same command goes on with {place}")
        raise
    done = [run for run in runs if run.begun and run.name not in work.failures]
    result = Sweep(
        folder=place,
        runs=tuple(Run(run.folder, **functions) for run in done),
        settings=tuple(run.setting for run in done),
        failures=work.failures,
    )
    if done:
        replace(place / "sweep.svg", [result.picture()])
    return result


def _identity(
    base: Recipe, values: Mapping[str, Sequence[Any]], functions: Mapping[str, Any], recipe: RecipeSource
) -> str:
    """What a sweep is, as sweep.json has it: the recipe, the values, and what functions that are given as objects make
    of the recipe, with the source of those that have no name."""
    told: dict[str, Any] = {"format": FORMAT, "recipe": base.model_dump(mode="json"), "grid": values}
    if functions:
        found, own = collect(**functions, root=folder_of(recipe))
        told |= {"given": own, "sources": found.sources(found.kinds)}
    return to_json(told, indent=1) + "\n"


def _values(grid: Any) -> dict[str, list[Any]]:
    """The values of each key, as a recipe can hold them. RecipeError if these are none."""
    fix = 'give keys with lists of values, such as {"optimizer.lr": [1e-4, 1e-3]}'
    if not isinstance(grid, Mapping) or not grid:
        raise RecipeError.of("grid", f"is {grid!r} and names no values to try", fix)
    found = {}
    for key, values in grid.items():
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable) or not (tried := list(values)):
            raise RecipeError.of("grid", f"{key} has {values!r} and no values to try", fix)
        found[str(key)] = [plain(value) for value in tried]
        try:
            to_json(found[str(key)])
        except TypeError as error:
            raise RecipeError.of("grid", f"{key} has a value that no recipe can hold: {error}", fix) from None
    return found


def _combinations(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination, the last key changing first."""
    if (count := math.prod(map(len, grid.values()))) > MOST:
        raise RecipeError.of("grid", f"asks for {count:,} runs", f"use {MOST} or fewer")
    for values in product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


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


def _refuse_wrong(
    recipe: RecipeSource, changes: Sequence[Any], runs: Sequence[GridRun], given: Mapping[str, Any]
) -> None:
    """Everything wrong with any of the recipes, before the first begins."""
    problems: dict[Problem, None] = {}
    for run in runs:
        if not run.begun:
            found = check(recipe, changes=[*changes, dict(run.setting)], **given)
            problems |= dict.fromkeys(found)
    if problems:
        raise RecipeError(*problems)


def _refuse_processes(recipe: RecipeSource, at_once: int, given: Mapping[str, Any]) -> None:
    """What processes of their own could not be told."""
    if at_once > 1 and (given or not isinstance(recipe, str | os.PathLike)):
        raise RecipeError.of("at_once", "needs a recipe in a file and no functions given as objects", "use at_once=1")
