"""Starting, resuming and finishing a run: folders, checkpoints and the terminal around the loop.

What a run is lives in its folder. `start` makes a new one; `resume` goes on in an old one and refuses to go on with
another recipe than the one the checkpoint was trained with, unless told which keys may differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto import plugins, threads
from stretto.checks.own_code import import_plugins
from stretto.errors import CheckpointError, StateLostError, StrettoError
from stretto.recipe.load import Changes
from stretto.recipe.schema import Recipe
from stretto.report.console import Progress, console_for
from stretto.report.own_logger import own_logger
from stretto.report.tensorboard import TensorBoard
from stretto.runtime.base_copy import Note
from stretto.runtime.build import build_runtime
from stretto.runtime.download import fetch_models
from stretto.runtime.evaluate import Evaluation, measured_words
from stretto.runtime.forecast import PlannedRun, compare_to_forecast, planned, write
from stretto.runtime.guards import free_disk
from stretto.runtime.inputs import InputsRecorder, refuse_changed
from stretto.runtime.interrupt import interrupt_answered, stop_if_interrupted
from stretto.runtime.loop import RunOutput, lacks_evaluation, train
from stretto.runtime.memory_rehearsal import rehearse_if_asked
from stretto.runtime.moved import point_adapters
from stretto.runtime.precision import resolve_dtype
from stretto.runtime.recipe_changes import (
    FixedRecord,
    RecipeRecord,
    allowed,
    refuse_fewer_steps,
    refuse_unknown,
)
from stretto.runtime.recipe_file import load_run_recipe, recipe_text
from stretto.runtime.resume_point import set_aside, standing
from stretto.runtime.runtime import Runtime
from stretto.runtime.user_functions import NONE_GIVEN, Callbacks, UserFunctions
from stretto.runtime.value_table import run_values
from stretto.runtime.watch import StageWatch, limits
from stretto.storage.atomic import replace
from stretto.storage.checkpoint import Checkpoints, metrics_of, step_of
from stretto.storage.lock import held
from stretto.storage.run_folder import Journal, claim_folder, forget_unbegun, free_folder
from stretto.types import Stateful
from stretto.workers.models import EngineFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a run came to."""

    folder: Path
    """The run's folder."""
    model: Path
    """The checkpoint of its last step."""
    evaluations: tuple[tuple[int, Evaluation], ...]
    """(step, evaluation), those of this session."""


def start(
    recipe: Recipe,
    *,
    name: str,
    root: Path,
    progress: Progress | None = None,
    make_engine: EngineFactory | None = None,
    given: UserFunctions = NONE_GIVEN,
) -> Finished:
    """Trains a recipe in a new folder. `name` is what an automatic folder is called after."""
    explicit = recipe.run.folder != "auto"
    free_disk(recipe.guards, Path(recipe.run.folder if explicit else "runs"))
    folder = claim_folder(Path(recipe.run.folder)) if explicit else free_folder(name, Path("runs"))
    try:
        with held(folder):
            return _run_with_restarts(
                recipe, folder=folder, root=root, progress=progress, make_engine=make_engine, given=given
            )
    except StrettoError:
        forget_unbegun(folder)
        raise


def resume(
    folder: Path,
    *,
    changes: Changes = (),
    allow: Sequence[str] = (),
    restart: bool = False,
    progress: Progress | None = None,
    make_engine: EngineFactory | None = None,
    given: UserFunctions = NONE_GIVEN,
) -> Finished:
    """Goes on where the newest sound checkpoint of a run stands; from the beginning if it never wrote one.

    With `restart` from the beginning in any case, and what it has made so far is set aside.
    """
    before, root = load_run_recipe(folder)
    recipe, _ = load_run_recipe(folder, changes)
    refuse_unknown(allow, before, recipe)
    RecipeRecord(recipe, allow=allow, held=FixedRecord(folder=folder, root=root)).restore(
        before.model_dump(mode="json")
    )
    with held(folder):
        told = f"beginning again; what was there is in {set_aside(folder)}" if restart else ""
        return _run_with_restarts(
            recipe, folder=folder, root=root, progress=progress, make_engine=make_engine, again=True, told=told,
            allow=tuple(allow), before=before, given=given,
        )  # fmt: skip


def _run_with_restarts(recipe: Recipe, *, folder: Path, again: bool = False, told: str = "", **rest: Any) -> Finished:
    """The whole of a run, which goes back to its newest checkpoint when nobody is left who holds what training needs.

    Once from each checkpoint: what dies again before the next one would die for ever.
    """
    checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.checkpoint.keep, best=recipe.checkpoint.best)
    since = -1
    while True:
        try:
            return threads.run(_run(recipe, folder=folder, again=again, told=told, **rest))
        except StateLostError as lost:
            newest = standing(checkpoints, every=recipe.checkpoint.every).latest
            step = step_of(newest) if newest else 0
            if step <= since:
                raise
            since, again = step, True
            where = f"step {step}, the newest checkpoint" if newest else "the beginning, as there is no checkpoint"
            told = f"{lost.args[0].removesuffix('; resume the run')}; going back to {where}"


async def _run(
    recipe: Recipe,
    *,
    folder: Path,
    root: Path,
    progress: Progress | None,
    make_engine: EngineFactory | None,
    again: bool = False,
    allow: tuple[str, ...] = (),
    before: Recipe | None = None,
    told: str = "",
    given: UserFunctions = NONE_GIVEN,
) -> Finished:
    """The whole of a run between its folder and its summary; `told` is why it begins again, `before` the old recipe."""
    checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.checkpoint.keep, best=recipe.checkpoint.best)
    with interrupt_answered(), progress or console_for(sys.stdout) as screen:
        for text in (*[told] * bool(told), f"run folder {folder}"):
            screen.note(text)
        every = (load_run_recipe(folder)[0] if again else recipe).checkpoint.every
        stand = standing(checkpoints, every=every, note=screen.note)
        done, metrics = (step_of(stand.latest), metrics_of(stand.latest)) if stand.latest else (0, {})
        if again:
            _refuse(folder, recipe, before or recipe, root, done=done, allow=allow, note=screen.note, given=given)
            point_adapters(folder, recipe, root)
        import_plugins(recipe, root)  # those that are as they were
        course = planned(recipe := resolve_dtype(recipe, root, screen.note), root, screen.note)
        pending, after = lacks_evaluation(recipe, done, metrics), done if again else None
        # The recipe is on disk before anything heavy starts, so that a run killed in its first second can be resumed.
        with _journal(recipe, folder, root=root, plan=course, done=after, pending=pending, note=screen.note) as journal:
            fetch_models(recipe, root, screen.note)
            parts = await build_runtime(
                recipe, plan=course.plan, root=root, folder=folder, note=screen.note, make_engine=make_engine,
                values=run_values(recipe, root, folder), given=given, watch=startup_deadline(recipe, folder),
            )  # fmt: skip
            try:
                await rehearse_if_asked(parts, screen.note)  # while the optimizer is fresh
                stateful = _stateful(recipe, parts, folder=folder, root=root, allow=allow)
                if stand.latest:
                    checkpoints.restore(stand.latest, stateful, written=parts.worker_group.files.names)
                await parts.restored(stand.latest)
                checkpoints.set_aside(*stand.skipped)
                if again:  # only now: a recipe that the checkpoint does not go with must not stay in the folder
                    replace(folder / "recipe.yaml", [recipe_text(recipe, root, folder)])
                    write(folder, course, None)
                screen.start(recipe.run.steps, done)
                desk = RunOutput(
                    journal=journal, checkpoints=checkpoints, progress=screen, stateful=stateful,
                    callbacks=Callbacks(given.callbacks, strict=recipe.run.callbacks_strict, note=screen.note),
                )  # fmt: skip
                with InputsRecorder(folder, recipe, root, given):
                    evaluations = await train(parts, desk, done=done, metrics=metrics)
                finished = Finished(folder=folder, model=_last(checkpoints), evaluations=tuple(evaluations))
                beside = compare_to_forecast(folder, course, recipe, root, after=done, memory=await parts.memory())
                screen.finish([*summary(finished), *[""] * bool(beside), *beside])
                return finished
            except StateLostError:
                stop_if_interrupted()  # whoever pressed Ctrl-C wants no second try
                raise
            finally:
                await parts.close()


def _refuse(folder: Path, recipe: Recipe, before: Recipe, root: Path, *, done: int, **rest: Any) -> None:
    """A resume of what is not as it was, while nothing is touched yet; `before` is the recipe as it was."""
    refuse_fewer_steps(recipe, done)
    refuse_changed(folder, before, root, **rest)


def _stateful(
    recipe: Recipe, parts: Runtime, *, folder: Path, root: Path, allow: Sequence[str]
) -> tuple[Stateful, ...]:
    """What a checkpoint holds; restored, it refuses what differs and was not allowed to."""
    parts.prompts.takes_others = any(allowed("task.source", [key]) or allowed(key, ["task.source"]) for key in allow)
    return (RecipeRecord(recipe, allow=allow, held=FixedRecord(folder=folder, root=root)), *parts.stateful)


def startup_deadline(recipe: Recipe, folder: Path) -> AbstractContextManager[None]:
    """The deadline of loading and warming up."""
    return StageWatch(limits=limits(recipe), folder=folder).stage("start", 0, "nothing was finished before")


def _journal(
    recipe: Recipe, folder: Path, *, root: Path, plan: PlannedRun, done: int | None, pending: bool, note: Note
) -> Journal:
    """The run folder: a new one, or open again for what follows the step `done`, its evaluation included if pending."""
    after = None if done is None else done - pending
    sinks = [
        own_logger(name, folder, plugins.folders_of(root), note)
        if plugins.is_plugin(name)
        else TensorBoard(folder / "tensorboard", after=after)
        for name in recipe.log
    ]
    if done is not None:
        return Journal.reopen(folder, step=done, again=pending, sinks=sinks, note=note)
    return Journal.create(folder, recipe=recipe_text(recipe, root, folder), plan=plan.to_json(), sinks=sinks)


def _last(checkpoints: Checkpoints) -> Path:
    latest = checkpoints.latest()
    if latest is None:
        raise CheckpointError(f"{checkpoints.folder}: the run ended without a sound checkpoint")
    return latest


def summary(finished: Finished) -> list[str]:
    """What to tell the user at the end."""
    lines = []
    if finished.evaluations:
        (first, before), (last, after) = finished.evaluations[0], finished.evaluations[-1]
        if before.accuracy is not None and after.accuracy is not None and after.interval is not None:
            low, high = after.interval
            lines.append(
                f"held-out accuracy {before.accuracy:.2f} (step {first}) -> {after.accuracy:.2f} (step {last}), "
                f"95 % interval {low:.2f} to {high:.2f}, {after.prompts}"
            )
        for old, new in zip(measured_words(before), measured_words(after), strict=True):
            lines.append(f"{old} (step {first}) -> {new.removeprefix('held-out ')} (step {last})")
    places = {"model": finished.model, "metrics": finished.folder / "metrics.jsonl"}
    if (samples := finished.folder / "samples").is_dir() and any(samples.iterdir()):
        places["samples"] = samples
    return [*lines, *(f"{name:<8} {place}" for name, place in places.items())]
