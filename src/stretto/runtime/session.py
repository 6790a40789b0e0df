"""Starting, resuming and finishing a run: folders, checkpoints and the terminal around the loop.

What a run is lives in its folder. `start` makes a new one; `resume` goes on in an old one and refuses to go on with
another recipe than the one the checkpoint was trained with, unless told which keys may differ.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stretto import plugins, threads
from stretto.checks.own_code import import_plugins
from stretto.errors import RunStopped, StateLostError, StrettoError
from stretto.models.memory import loaded_objects_frozen
from stretto.recipe.load import Changes
from stretto.recipe.schema import Recipe
from stretto.recipe.time_limit import time_left
from stretto.report.console import Progress, console_for
from stretto.report.diagnosis import Diagnosis
from stretto.report.loggers import LIBRARIES, library_logger
from stretto.report.own_logger import own_logger
from stretto.report.read_run import flat
from stretto.report.tensorboard import TensorBoard
from stretto.runtime.base_copy import Note
from stretto.runtime.build import build_runtime
from stretto.runtime.core_share import core_share
from stretto.runtime.drift import DriftGuards
from stretto.runtime.endings import Finished, RunPlace, finished, sound, unwritten, where_it_stands
from stretto.runtime.evaluate import Evaluation
from stretto.runtime.forecast import (
    ForecastCorrection,
    PlannedRun,
    compare_to_forecast,
    forecast_at_start,
    planned,
    write,
)
from stretto.runtime.guards import free_disk
from stretto.runtime.host_watch import HostWatch
from stretto.runtime.inputs import InputsRecorder, allowed_before, refuse_changed, threads_before
from stretto.runtime.interrupt import StopRequest, interrupt_answered, stop_if_interrupted
from stretto.runtime.live_page import LivePage
from stretto.runtime.loop import RunOutput, lacks_evaluation, train
from stretto.runtime.memory_rehearsal import rehearse_if_asked
from stretto.runtime.moved import point_adapters
from stretto.runtime.precision import resolve_precision
from stretto.runtime.recipe_changes import (
    FixedRecord,
    RecipeRecord,
    allowed,
    refuse_fewer_steps,
    refuse_resume,
)
from stretto.runtime.recipe_file import load_run_recipe, recipe_text, with_lasting_paths, with_rates
from stretto.runtime.resume_point import ResumePoint, set_aside, standing
from stretto.runtime.runtime import Runtime
from stretto.runtime.saving import CheckpointWriter
from stretto.runtime.time_limit import TimeLimit
from stretto.runtime.user_functions import NONE_GIVEN, Callbacks, UserFunctions
from stretto.runtime.value_table import run_values
from stretto.runtime.watch import StageWatch, limits
from stretto.storage.atomic import replace
from stretto.storage.checkpoint import Checkpoints, metrics_of, step_of
from stretto.storage.json_lines import numbers_of, read_rows
from stretto.storage.lock import held
from stretto.storage.run_folder import Journal, Sink, claim_folder, forget_unbegun, free_folder
from stretto.types import Stateful
from stretto.workers.models import EngineFactory


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
    recipe, explicit = with_lasting_paths(recipe, root), recipe.run.folder != "auto"
    free_disk(recipe.guards, Path(recipe.run.folder if explicit else "runs"))
    place = RunPlace.of(claim_folder(Path(recipe.run.folder)) if explicit else free_folder(name, Path("runs")))
    try:
        with held(place.folder):
            return _run_with_restarts(
                recipe, place=place, root=root, progress=progress, make_engine=make_engine, given=given
            )
    except StrettoError:
        forget_unbegun(place.folder)
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
    refuse_resume(folder, before, recipe, root, allow=allow, restart=restart)
    place = RunPlace.of(folder)
    with held(place.folder):
        told = f"beginning again; what was there is in {folder / set_aside(place.folder).name}" if restart else ""
        return _run_with_restarts(
            recipe, place=place, root=root, progress=progress, make_engine=make_engine, again=True, told=told,
            allow=tuple(allow), before=before, given=given,
        )  # fmt: skip


def _run_with_restarts(
    recipe: Recipe,
    *,
    place: RunPlace,
    again: bool = False,
    told: str = "",
    allow: tuple[str, ...] = (),
    before: Recipe | None = None,
    **rest: Any,
) -> Finished:
    """The whole of a run, which goes back to its newest checkpoint when nobody is left who holds what training needs.

    Once from each checkpoint: what dies again before the next one would die for ever.
    """
    folder = place.folder
    checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.checkpoint.keep, best=recipe.checkpoint.best)
    left = time_left(recipe.run.until, os.environ, datetime.now(UTC))
    since, request = -1, StopRequest(left and (time.monotonic() + left[0], left[1]))
    begun, goes_on = checkpoints.newest() or 0, {"place": place, "allow": allow, "before": before, **rest}
    while True:
        try:
            return threads.run(_run(recipe, request, again=again, told=told, **goes_on))
        except KeyboardInterrupt as stop:
            asked = unwritten(folder, before, recipe, allow=allow, step=begun) if before else ()
            text = where_it_stands(place, checkpoints, recipe.run.steps, asked)
            raise RunStopped(text, exit_code=request.exit_code, why=request.why) from stop
        except StateLostError as lost:
            newest = standing(checkpoints, every=recipe.checkpoint.every).latest
            step = step_of(newest) if newest else 0
            if step <= since:
                raise
            since, again = step, True
            with suppress(OSError):  # modules and settings are looked up again, where they were found before
                os.chdir(place.begun_in)
            where = f"step {step}, the newest checkpoint" if newest else "the beginning, as there is no checkpoint"
            told = f"{lost.args[0].removesuffix('; resume the run')}; going back to {where}"


async def _run(
    recipe: Recipe,
    request: StopRequest,
    *,
    place: RunPlace,
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
    folder = place.folder
    checkpoints = Checkpoints(folder / "checkpoints", keep=recipe.checkpoint.keep, best=recipe.checkpoint.best)
    with interrupt_answered(request), progress or console_for(sys.stdout) as screen, TimeLimit(request, screen) as ends:
        for text in (*[told] * bool(told), f"run folder {place.shown}"):
            screen.note(text)
        stand, done, metrics = _stand(checkpoints, folder, recipe, again=again, note=screen.note)
        pending, after = lacks_evaluation(recipe, done, metrics), done if again else None
        if again:
            _refuse(folder, recipe, before or recipe, root, done=done, allow=allow, note=screen.note, given=given)
            allow = tuple(dict.fromkeys((*allow, *allowed_before(folder, done))))
            point_adapters(folder, recipe, root)
            if stand.latest and recipe == before and done >= recipe.run.steps and not pending:
                return _already_finished(stand.latest, place, recipe, root, allow=allow, screen=screen, given=given)
        import_plugins(recipe, root)  # those that are as they were
        recipe = with_rates(resolve_precision(recipe, root, screen.note), root, screen.note)
        course = planned(recipe, root, screen.note)
        # The recipe is on disk before anything heavy starts, so that a run killed in its first second can be resumed.
        with _journal(recipe, folder, root=root, plan=course, done=after, pending=pending, note=screen.note) as journal:
            parts = await build_runtime(
                recipe, plan=course.plan, root=root, folder=folder, note=screen.note, make_engine=make_engine,
                values=run_values(recipe, root, folder), given=given, watch=startup_deadline(recipe, folder),
            )  # fmt: skip
            output: RunOutput | None = None
            try:
                await rehearse_if_asked(parts, screen.note)  # while the optimizer is fresh
                stateful = _stateful(recipe, parts, folder=folder, root=root, allow=allow)
                if stand.latest:
                    checkpoints.restore(stand.latest, stateful, written=parts.worker_group.files.names)
                await parts.restored(stand.latest)
                checkpoints.set_aside(*stand.skipped)
                if again:  # only now: a recipe that the checkpoint does not go with must not stay in the folder
                    _record(folder, recipe, root, course)
                course = forecast_at_start(parts, course, root, folder, done=done, note=screen.note)
                output = _output(parts, journal, checkpoints, stateful, ends, screen, given, course)
                screen.start(recipe.run.steps, done)
                reads = _inputs(parts, folder, root, given, allowed=allow, since=done)
                with reads, output.host, output.page, core_share(parts.plan, parts.threads), loaded_objects_frozen():
                    evaluations = await train(parts, output, done=done, metrics=metrics)
                    return await _finish(parts, place, output, evaluations, root=root, after=done)
            except StateLostError:
                stop_if_interrupted()  # whoever pressed Ctrl-C wants no second try
                raise
            finally:
                if output is not None:
                    await output.saves.close(hurry=request.at_once or bool(parts.worker_group.silent))
                await parts.close()


def _stand(
    checkpoints: Checkpoints, folder: Path, recipe: Recipe, *, again: bool, note: Note
) -> tuple[ResumePoint, int, Mapping[str, float]]:
    """What a run begins from: its checkpoints, the step of the newest sound one, and the metrics of that."""
    every = (load_run_recipe(folder)[0] if again else recipe).checkpoint.every
    checkpoints.recover()
    stand = standing(checkpoints, every=every, note=note)
    return stand, *((step_of(stand.latest), metrics_of(stand.latest)) if stand.latest else (0, {}))


def _inputs(parts: Runtime, folder: Path, root: Path, given: UserFunctions, **more: Any) -> InputsRecorder:
    """Records what this session reads and computes with."""
    threads = parts.threads.get(parts.plan.devices[0])
    return InputsRecorder(folder, parts.recipe, root, given, threads=threads, **more)


def _already_finished(
    latest: Path,
    place: RunPlace,
    recipe: Recipe,
    root: Path,
    *,
    allow: Sequence[str],
    screen: Progress,
    given: UserFunctions,
) -> Finished:
    """A resume that has nothing left to do; it refuses what any resume refuses, and an old run has a record then."""
    folder = place.folder
    Checkpoints.restore_part(latest, _recipe_record(recipe, folder, root, allow))
    with InputsRecorder(
        folder, recipe, root, given, threads=threads_before(folder), allowed=allow, since=step_of(latest)
    ):
        return finished(screen, place, latest, step_of(latest))


def _record(folder: Path, recipe: Recipe, root: Path, course: PlannedRun) -> None:
    """What the run goes on with, instead of what it was begun with."""
    replace(folder / "recipe.yaml", [recipe_text(recipe, root, folder)])
    write(folder, course, None)


def _output(
    parts: Runtime,
    journal: Journal,
    checkpoints: Checkpoints,
    stateful: Sequence[Stateful],
    limit: TimeLimit,
    screen: Progress,
    given: UserFunctions,
    course: PlannedRun,
) -> RunOutput:
    """Where a run writes what happens."""
    recipe, folder = parts.recipe, journal.folder
    return RunOutput(
        journal=journal,
        saves=CheckpointWriter(parts, journal=journal, checkpoints=checkpoints, stateful=stateful, durable=limit.saved),
        time_limit=limit,
        drift=DriftGuards(recipe.guards, folder, steps_of(folder)),
        host=HostWatch(),
        progress=screen,
        callbacks=Callbacks(given.callbacks, strict=recipe.run.callbacks_strict, note=screen.note),
        page=LivePage(folder, screen.note, wanted=recipe.run.report),
        diagnosis=Diagnosis(recipe, parts.renderer.turn_tokens, read_rows(folder / "metrics.jsonl")),
        forecast=ForecastCorrection(recipe, course, folder),
    )


async def _finish(
    parts: Runtime,
    place: RunPlace,
    output: RunOutput,
    evaluations: Sequence[tuple[int, Evaluation]],
    *,
    root: Path,
    after: int,
) -> Finished:
    """What the run came to, which is shown, beside what was expected of the steps after `after`."""
    recipe, course = parts.recipe, output.forecast.course
    beside = compare_to_forecast(place.folder, course, recipe, root, after=after, memory=await parts.memory())
    model = sound(output.saves.checkpoints)
    return finished(output.progress, place, model, recipe.run.steps, evaluations, [*[""] * bool(beside), *beside])


def steps_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of the steps that a run has taken; what was measured before the first is none."""
    return [numbers_of(row) for row in read_rows(folder / "metrics.jsonl") if row["step"] > 0]


def _refuse(folder: Path, recipe: Recipe, before: Recipe, root: Path, *, done: int, **rest: Any) -> None:
    """A resume of what is not as it was, while nothing is touched yet; `before` is the recipe as it was."""
    refuse_fewer_steps(recipe, done)
    refuse_changed(folder, before, root, **rest)


def _stateful(
    recipe: Recipe, parts: Runtime, *, folder: Path, root: Path, allow: Sequence[str]
) -> tuple[Stateful, ...]:
    """What a checkpoint holds; restored, it refuses what differs and was not allowed to."""
    parts.prompts.takes_others = any(allowed("task.source", [key]) or allowed(key, ["task.source"]) for key in allow)
    return (_recipe_record(recipe, folder, root, allow), *parts.stateful)


def _recipe_record(recipe: Recipe, folder: Path, root: Path, allow: Sequence[str]) -> RecipeRecord:
    """What refuses another recipe than the one of a checkpoint, or of the folder."""
    return RecipeRecord(recipe, allow=allow, held=FixedRecord(folder=folder, root=root))


def startup_deadline(recipe: Recipe, folder: Path) -> AbstractContextManager[None]:
    """The deadline of loading and warming up."""
    return StageWatch(limits=limits(recipe), folder=folder).stage("start", 0, "nothing was finished before")


def _journal(
    recipe: Recipe, folder: Path, *, root: Path, plan: PlannedRun, done: int | None, pending: bool, note: Note
) -> Journal:
    """The run folder: a new one, or open again for what follows the step `done`, its evaluation included if pending."""
    after = None if done is None else done - pending
    sinks = [sink_of(name, folder, root, after=after, note=note) for name in recipe.log]
    keys = dict(flat(recipe.model_dump(mode="json")))
    for sink in sinks:
        sink.recipe(keys)
    if done is not None:
        return Journal.reopen(folder, step=done, again=pending, sinks=sinks, note=note)
    return Journal.create(folder, recipe=recipe_text(recipe, root, folder), plan=plan.to_json(), sinks=sinks)


def sink_of(name: str, folder: Path, root: Path, *, after: int | None, note: Note) -> Sink:
    """Where else what a run finds goes, by its name in `log`."""
    if plugins.is_plugin(name):
        return own_logger(name, folder, plugins.folders_of(root), note)
    if name in LIBRARIES:
        return library_logger(name, folder, after=after, note=note)
    return TensorBoard(folder / "tensorboard", after=after)
