"""The method on one page: prompts -> collect -> score -> credit -> accumulate -> apply -> publish.

Consumes parts; produces steps in the journal. It knows no algorithm, no engine and no strategy by name. A step's
weights move at the end of a step alone; whatever is interrupted before leaves the run as it was after the step before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stretto.algorithms.catalog import facts_of
from stretto.errors import RewardError, StrettoError
from stretto.recipe.schema import Recipe
from stretto.report.console import Progress
from stretto.report.diagnosis import Diagnosis
from stretto.runtime import guards
from stretto.runtime.batch import StepBatch
from stretto.runtime.drift import DriftGuards
from stretto.runtime.evaluate import Evaluation, evaluate, measured_words
from stretto.runtime.forecast import BETWEEN_STEPS, ForecastCorrection
from stretto.runtime.host_watch import HostWatch
from stretto.runtime.interrupt import stop_if_interrupted, unbroken
from stretto.runtime.live_page import LivePage
from stretto.runtime.metrics import heldout_rows, lag, sample_rows, step_metrics
from stretto.runtime.runtime import Runtime
from stretto.runtime.saving import CheckpointWriter
from stretto.runtime.schedule import StepResult, run_step
from stretto.runtime.spans import Clock
from stretto.runtime.time_limit import TimeLimit
from stretto.runtime.training_data import learning_metrics
from stretto.runtime.user_functions import Callbacks, StepEvent
from stretto.runtime.watch import QUIET, LoopWatch, StageWatch, limits
from stretto.storage.run_folder import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutput:
    """Where a run writes what happens."""

    journal: Journal
    """The run folder."""
    saves: CheckpointWriter
    """The run's checkpoints."""
    time_limit: TimeLimit
    """Asks the run to end in time."""
    drift: DriftGuards
    """Warns of what goes wrong slowly."""
    host: HostWatch
    """Measures how this process is."""
    progress: Progress
    """The terminal."""
    callbacks: Callbacks
    """The user's functions that are called after each step."""
    page: LivePage
    """report.html."""
    diagnosis: Diagnosis
    """Says what is wrong with the run."""
    forecast: ForecastCorrection
    """Corrects the forecast of the run's start by its first steps."""
    quiet: float = QUIET
    """Seconds without a turn of the event loop after which the line that blocks it is named."""


async def train(
    parts: Runtime, output: RunOutput, *, done: int, metrics: Mapping[str, float]
) -> list[tuple[int, Evaluation]]:
    """Runs the steps after `done`; returns the evaluations made.

    `metrics` are those of the step `done`. If its evaluation is missing, it is made up for: before the first step there
    was none yet, and later one may have been interrupted.
    """
    recipe = parts.recipe
    pool = parts.pool
    beat = LoopWatch(
        turned=lambda: output.host.turned,
        note=output.progress.note,
        deadline=recipe.environment.deadline,
        asked=lambda: bool(output.time_limit.request.why),
        quiet=output.quiet,
    )
    watch = StageWatch(
        limits=limits(recipe), folder=output.journal.folder, moved=lambda: pool.moved, last_words=pool.kill, loop=beat
    )
    clock = Clock(watch, parts.devices)
    evaluations: list[tuple[int, Evaluation]] = []
    if lacks_evaluation(recipe, done, metrics):
        metrics = await evaluated(parts, output, clock, step=done, metrics=metrics, into=evaluations)
        note_step(output, clock, step=done, metrics=metrics)
        output.diagnosis.evaluated(done, metrics)
        output.forecast.seen(done, {name: metrics[name] for name in BETWEEN_STEPS if name in metrics})
        if done:
            await unbroken(output.saves.begin(clock, step=done, metrics=metrics))
        output.journal.timeline(clock.events())
    for step in range(done + 1, recipe.run.steps + 1):
        cursor, begun = parts.prompts.state(), time.monotonic()
        output.saves.check()
        clock.begin()
        try:
            stop_if_interrupted()
            taken = await run_step(parts, clock, step=step)
        except (asyncio.CancelledError, StrettoError) as error:
            parts.prompts.restore(cursor)
            if isinstance(error, RewardError) and isinstance(error.batch, StepBatch):
                output.journal.samples(step, answers_of(parts, error.batch, step=step))
                shown = f"stretto samples {output.journal.folder} --step {step}"
                output.progress.note(f"all answers of step {step}: {shown}")
            await save_before(error, output, clock, step=step - 1, metrics=metrics)
            raise
        guards.finite(recipe.guards, taken.updates[-1], step=step, suspects=taken.suspects)
        batch, metrics = taken.batch, step_numbers(parts, taken)
        metrics |= {**parts.worker_group.spent(), **output.host.metrics()}
        metrics |= {**clock.metrics(), "weights/version": parts.version, "weights/staleness": lag(batch, parts.version)}
        answers = answers_of(parts, batch, step=step)
        if parts.data is None:
            output.journal.samples(step, answers)
        if lacks_evaluation(recipe, step, metrics):
            metrics = await evaluated(parts, output, clock, step=step, metrics=metrics, into=evaluations)
        note_step(output, clock, step=step, metrics=metrics)
        output.progress.step(step, metrics)
        if corrected := output.forecast.seen(step, metrics):
            output.progress.note(corrected)
        show(output, step=step, metrics=metrics, answers=answers)
        if unknown := parts.renderer.unknown_warning():
            output.progress.note(unknown)
        if len(batch.accepted) < recipe.batch.prompts:
            output.progress.note(shortage(batch, recipe.batch.prompts, step=step))
        if step == recipe.run.steps or step % recipe.checkpoint.every == 0:
            await unbroken(output.saves.begin(clock, step=step, metrics=metrics))
        output.journal.timeline(clock.events())
        output.page.stepped()
        try:
            judge_step(recipe, output, step=step, metrics=metrics)
            if step < recipe.run.steps:  # what is done needs no time for another
                output.time_limit.stepped(time.monotonic() - begun)
            stop_if_interrupted()
        except (asyncio.CancelledError, StrettoError) as error:
            await save_before(error, output, clock, step=step, metrics=metrics)
            raise
    await unbroken(output.saves.settled())
    return evaluations


def step_numbers(parts: Runtime, taken: StepResult) -> dict[str, float]:
    """What a step was made of and what came of it, by the names of metrics.jsonl."""
    if parts.data is not None:
        return learning_metrics(taken.batch, taken.report, entropy=parts.data.imitates)
    contrasts = facts_of(parts.recipe.algorithm.name).learns_by_contrast
    return {**step_metrics(taken.batch, parts.recipe.batch, parts.algorithm, contrasts=contrasts), **taken.report}


def answers_of(parts: Runtime, batch: StepBatch, *, step: int) -> list[dict[str, Any]]:
    """The step's answers, as they are kept; none where rows are learned from."""
    if parts.data is not None:
        return []
    return list(sample_rows(batch, renderer=parts.renderer, environment=parts.recipe.environment.kind, step=step))


def show(output: RunOutput, *, step: int, metrics: Mapping[str, float], answers: Sequence[Mapping[str, Any]]) -> None:
    """One of the step's answers, and what is wrong with the run, if anything is that no guard has warned of."""
    if answers:
        output.progress.sampled(answers[0])
    for rule, text in output.diagnosis.step(step, metrics, answers, warned=output.drift.warned).items():
        output.progress.note(f"step {step}: {text}")
        output.journal.event("diagnosis", step=step, rule=rule, text=text)


def judge_step(recipe: Recipe, output: RunOutput, *, step: int, metrics: Mapping[str, float]) -> None:
    """The user's callbacks, and the guards, each of which may end the run; a step's lines are written by then.

    A warning of what was shown already is only recorded.
    """
    output.callbacks(StepEvent(step=step, steps=recipe.run.steps, metrics=dict(metrics), folder=output.journal.folder))
    guards.after_step(recipe.guards, metrics)
    for warning in output.drift.after_step(metrics):
        output.journal.event("warning", step=step, guard=warning.guard, text=warning.text)
        if not output.diagnosis.has_told(warning.guard):
            output.progress.note(f"step {step}: warning (guards.{warning.guard}): {warning.text}")


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
    output: RunOutput,
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
        await save_before(error, output, clock, step=step, metrics=metrics)
        raise
    into.append((step, replace(evaluation, greedy=None)))  # on the disk from here on, not in memory
    if evaluation.greedy is not None:
        rows = heldout_rows(
            evaluation.greedy, renderer=parts.renderer, environment=parts.recipe.environment.kind, step=step
        )
        output.journal.held_out(step, rows)
    if evaluation.accuracy is not None and evaluation.interval is not None:
        verdicts = evaluation.verdicts.items()
        right, wrong = ([prompt for prompt, verdict in verdicts if verdict is told] for told in (True, False))
        output.journal.event("evaluated", step=step, right=right, wrong=wrong)
        output.progress.evaluated(
            step, evaluation.accuracy, *evaluation.interval, evaluation.prompts, evaluation.reward
        )
    else:
        output.progress.note(f"step {step}: {' '.join(measured_words(evaluation.measures))}, {evaluation.prompts}")
    if evaluation.failure is not None:
        output.progress.note(unjudged(evaluation, step=step))
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
    judged: dict[str, float] = {}
    if evaluation.accuracy is not None and evaluation.interval is not None:
        low, high = evaluation.interval
        judged = {"eval/accuracy": evaluation.accuracy, "eval/low": low, "eval/high": high}
    if evaluation.reward is not None:
        judged |= {"eval/reward": evaluation.reward}
        judged |= {f"eval/reward/part/{name}": mean for name, mean in evaluation.parts.items()}
    passes = {f"eval/pass_at_{k}": chance for k, chance in evaluation.pass_at_k.items()}
    passes |= {f"eval/pass_at_{k}_n": n for k, n in evaluation.pass_n.items()}
    counts = {"eval/n": evaluation.n, "eval/asked": evaluation.asked}
    return {**judged, **evaluation.measures, **counts, **passes}


async def save_before(
    error: BaseException, output: RunOutput, clock: Clock, *, step: int, metrics: Mapping[str, float]
) -> None:
    """A checkpoint before `error` ends the run, so that a resume has nothing to do again. A failure is only told."""
    try:
        await unbroken(output.saves.save(clock, step=step, metrics=metrics))
    except StrettoError as failure:
        if isinstance(error, asyncio.CancelledError):  # whoever pressed Ctrl-C counts on the checkpoint
            raise
        output.progress.note(f"no checkpoint of step {step} could be written: {failure}")


def note_step(output: RunOutput, clock: Clock, *, step: int, metrics: Mapping[str, float]) -> None:
    """The step's spans, then its metrics: whoever has these has those."""
    output.journal.timeline(clock.events())
    output.journal.metrics(step, metrics)
