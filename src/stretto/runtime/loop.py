"""The method on one page: prompts -> collect -> score -> credit -> accumulate -> apply -> publish.

Consumes parts; produces steps in the journal. It knows no algorithm, no engine and no strategy by name. A step's
weights move at the end of a step alone; whatever is interrupted before leaves the run as it was after the step before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from stretto.errors import StrettoError
from stretto.recipe.schema import Recipe
from stretto.report.console import Progress
from stretto.runtime import guards
from stretto.runtime.batch import StepBatch
from stretto.runtime.evaluate import Evaluation, evaluate, measured_words
from stretto.runtime.interrupt import stop_if_interrupted, unbroken
from stretto.runtime.metrics import lag, sample_rows, step_metrics
from stretto.runtime.runtime import Runtime
from stretto.runtime.schedule import StepResult, run_step
from stretto.runtime.spans import Clock
from stretto.runtime.training_data import learning_metrics
from stretto.runtime.user_functions import Callbacks, StepEvent
from stretto.runtime.watch import StageWatch, limits
from stretto.storage.checkpoint import Checkpoints
from stretto.storage.lock import still_held
from stretto.storage.run_folder import Journal
from stretto.types import Stateful


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutput:
    """Where a run writes what happens."""

    journal: Journal
    """The run folder."""
    checkpoints: Checkpoints
    """The run's checkpoints."""
    progress: Progress
    """The terminal."""
    stateful: tuple[Stateful, ...]
    """What a checkpoint holds."""
    callbacks: Callbacks
    """The user's functions that are called after each step."""


async def train(
    parts: Runtime, desk: RunOutput, *, done: int, metrics: Mapping[str, float]
) -> list[tuple[int, Evaluation]]:
    """Runs the steps after `done`; returns the evaluations made.

    `metrics` are those of the step `done`. If its evaluation is missing, it is made up for: before the first step there
    was none yet, and later one may have been interrupted.
    """
    recipe = parts.recipe
    pool = parts.pool
    watch = StageWatch(
        limits=limits(recipe), folder=desk.journal.folder, moved=lambda: pool.moved, last_words=pool.kill
    )
    clock = Clock(watch, parts.devices)
    evaluations: list[tuple[int, Evaluation]] = []
    if lacks_evaluation(recipe, done, metrics):
        metrics = await evaluated(parts, desk, clock, step=done, metrics=metrics, into=evaluations)
        note_step(desk, clock, step=done, metrics=metrics)
        if done:
            await save(parts, desk, clock, step=done, metrics=metrics)
        desk.journal.timeline(clock.events())
    for step in range(done + 1, recipe.run.steps + 1):
        cursor = parts.prompts.state()
        clock.begin()
        try:
            stop_if_interrupted()
            taken = await run_step(parts, clock, step=step)
        except (asyncio.CancelledError, StrettoError) as error:
            parts.prompts.restore(cursor)
            await save_before(error, parts, desk, clock, step=step - 1, metrics=metrics)
            raise
        guards.finite(recipe.guards, taken.updates[-1], step=step)
        batch, metrics = taken.batch, step_numbers(parts, taken)
        metrics |= parts.worker_group.reduction()
        metrics |= {**clock.metrics(), "weights/version": parts.version, "weights/staleness": lag(batch, parts.version)}
        if parts.data is None:
            rows = sample_rows(
                batch.scored, batch.samples, renderer=parts.renderer, environment=recipe.environment.kind, step=step
            )
            desk.journal.samples(step, list(rows))
        if lacks_evaluation(recipe, step, metrics):
            metrics = await evaluated(parts, desk, clock, step=step, metrics=metrics, into=evaluations)
        note_step(desk, clock, step=step, metrics=metrics)
        desk.progress.step(step, metrics)
        if len(batch.accepted) < recipe.batch.prompts:
            desk.progress.note(shortage(batch, recipe.batch.prompts, step=step))
        if step == recipe.run.steps or step % recipe.checkpoint.every == 0:
            await save(parts, desk, clock, step=step, metrics=metrics)
        desk.journal.timeline(clock.events())
        try:
            desk.callbacks(
                StepEvent(step=step, steps=recipe.run.steps, metrics=dict(metrics), folder=desk.journal.folder)
            )
            guards.after_step(recipe.guards, metrics)
            stop_if_interrupted()
        except (asyncio.CancelledError, StrettoError) as error:
            await save_before(error, parts, desk, clock, step=step, metrics=metrics)
            raise
    return evaluations


def step_numbers(parts: Runtime, taken: StepResult) -> dict[str, float]:
    """What a step was made of and what came of it, by the names of metrics.jsonl."""
    if parts.data is not None:
        return learning_metrics(taken.batch, taken.report, entropy=parts.data.imitates)
    return {**step_metrics(taken.batch, parts.recipe.batch, parts.algorithm), **taken.report}


def shortage(batch: StepBatch, wanted: int, *, step: int) -> str:
    """Why a step trained on fewer groups than the recipe asks for."""
    judged = len(batch.scored.groups)
    flat = judged - len(batch.accepted)
    rounds = f"{batch.rounds} round{'s' if batch.rounds > 1 else ''}"
    return (
        f"step {step} trained on {len(batch.accepted)} of {wanted} groups: {batch.launched} were asked in {rounds}, "
        f"{batch.launched - judged} failed and {flat} had no contrast"
    )


def lacks_evaluation(recipe: Recipe, step: int, metrics: Mapping[str, float]) -> bool:
    """True if `step` should be followed by an evaluation and its metrics hold none."""
    every = recipe.evaluate.every
    due = every > 0 and (step % every == 0 or step == recipe.run.steps)
    return due and not metrics.keys() & {"eval/accuracy", "eval/loss"}


async def evaluated(
    parts: Runtime,
    desk: RunOutput,
    clock: Clock,
    *,
    step: int,
    metrics: Mapping[str, float],
    into: list[tuple[int, Evaluation]],
) -> dict[str, float]:
    """The metrics of `step` with its held-out accuracy. Interrupted, the step is kept and a resume evaluates it."""
    try:
        stop_if_interrupted()
        with clock.stage("evaluate", "generate", step=step, version=parts.version):
            evaluation = await evaluate(parts, parts.heldout, pass_k=parts.recipe.evaluate.pass_k)
    except (asyncio.CancelledError, StrettoError) as error:
        await save_before(error, parts, desk, clock, step=step, metrics=metrics)
        raise
    into.append((step, evaluation))
    if evaluation.accuracy is not None and evaluation.interval is not None:
        desk.progress.evaluated(step, evaluation.accuracy, *evaluation.interval, evaluation.prompts)
    else:
        desk.progress.note(f"step {step}: {' '.join(measured_words(evaluation))}, {evaluation.prompts}")
    if evaluation.failure is not None:
        desk.progress.note(unjudged(evaluation, step=step))
    return {**metrics, "seconds/evaluate": clock.spans[-1].seconds, **evaluation_metrics(evaluation)}


def unjudged(evaluation: Evaluation, *, step: int) -> str:
    """What an evaluation with missing verdicts is worth."""
    told = f"step {step}: some held-out answers have no verdict ({evaluation.failure})"
    if evaluation.n == evaluation.asked:
        return f"{told}; accuracy has them all, pass@k does not"
    return (
        f"{told}; accuracy is over {evaluation.prompts}, its interval holds whatever the others are, and "
        "checkpoint.best counts them as not shown to be right"
    )


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """An evaluation under the names of metrics.jsonl."""
    judged = {}
    if evaluation.accuracy is not None and evaluation.interval is not None:
        low, high = evaluation.interval
        judged = {"eval/accuracy": evaluation.accuracy, "eval/low": low, "eval/high": high}
    passes = {f"eval/pass_at_{k}": chance for k, chance in evaluation.pass_at_k.items()}
    passes |= {f"eval/pass_at_{k}_n": n for k, n in evaluation.pass_n.items()}
    counts = {"eval/n": evaluation.n, "eval/asked": evaluation.asked}
    return {**judged, **evaluation.measures, **counts, **passes}


async def save_before(
    error: BaseException, parts: Runtime, desk: RunOutput, clock: Clock, *, step: int, metrics: Mapping[str, float]
) -> None:
    """A checkpoint before `error` ends the run, so that a resume has nothing to do again. A failure is only told."""
    try:
        await save(parts, desk, clock, step=step, metrics=metrics)
    except StrettoError as failure:
        if isinstance(error, asyncio.CancelledError):  # whoever pressed Ctrl-C counts on the checkpoint
            raise
        desk.progress.note(f"no checkpoint of step {step} could be written: {failure}")


def note_step(desk: RunOutput, clock: Clock, *, step: int, metrics: Mapping[str, float]) -> None:
    """The step's spans, then its metrics: whoever has these has those."""
    still_held(desk.journal.folder)
    desk.journal.timeline(clock.events())
    desk.journal.metrics(step, metrics)


async def save(parts: Runtime, desk: RunOutput, clock: Clock, *, step: int, metrics: Mapping[str, float]) -> None:
    """A checkpoint of the run as it is after `step`. Where it is, the timeline of its step is, a kill or not."""
    guards.free_disk(parts.recipe.guards, desk.journal.folder)
    still_held(desk.journal.folder)
    with ExitStack() as stage:
        stage.enter_context(clock.stage("checkpoint", "train", step=step, version=parts.version))

        def ready() -> None:
            stage.close()
            desk.journal.timeline(clock.events())

        await unbroken(parts.fetch())
        path = desk.checkpoints.save(
            step,
            parts=desk.stateful,
            written=parts.worker_group.files.names,
            write_model=parts.write_model,
            metrics=metrics,
            ready=ready,
        )
    desk.journal.event("checkpoint", step=step, path=str(path))
