"""The method on one page: prompts -> collect -> score -> credit -> accumulate -> apply -> publish.

Consumes parts; produces steps in the journal. It knows no algorithm, no engine and no strategy by name. A step's
weights move in `learn` alone; whatever is interrupted before that leaves the run as it was after the step before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stretto.config.schema import Recipe
from stretto.report.console import Progress
from stretto.report.timeline import to_events
from stretto.rollout.collect import Launch
from stretto.run import guards
from stretto.run.checkpoint import Checkpoints
from stretto.run.clock import Clock
from stretto.run.evaluate import Evaluation, evaluate
from stretto.run.journal import Journal
from stretto.run.learn import credit, learn, reference_streams
from stretto.run.metrics import sample_rows, step_metrics
from stretto.run.parts import Parts
from stretto.types import Stateful
from stretto.weights.publish import publish


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """Where a run writes what happens."""

    journal: Journal
    """The run folder."""
    checkpoints: Checkpoints
    """Its checkpoints."""
    progress: Progress
    """The terminal."""
    stateful: tuple[Stateful, ...]
    """What a checkpoint holds."""


async def train(parts: Parts, desk: Desk, *, done: int, metrics: Mapping[str, float]) -> list[tuple[int, Evaluation]]:
    """Runs the steps after `done`; returns the evaluations made.

    `metrics` are those of the step `done`. If its evaluation is missing, it is made up for: before the first step there
    was none yet, and later one may have been interrupted.
    """
    recipe, clock = parts.recipe, Clock()
    evaluations: list[tuple[int, Evaluation]] = []
    if lacks_evaluation(recipe, done, metrics):
        metrics = await evaluated(parts, desk, clock, step=done, metrics=metrics, into=evaluations)
        desk.journal.metrics(done, metrics)
        if done:
            save(parts, desk, clock, step=done, metrics=metrics)
        desk.journal.timeline(to_events(clock.spans, host="localhost"))
    for step in range(done + 1, recipe.run.steps + 1):
        cursor = parts.prompts.state()
        clock.begin()
        try:
            new, rows = await one_step(parts, clock, step=step)
        except asyncio.CancelledError:
            parts.prompts.restore(cursor)
            save(parts, desk, clock, step=step - 1, metrics=metrics)
            raise
        desk.journal.samples(step, rows)
        metrics = new
        if lacks_evaluation(recipe, step, metrics):
            metrics = await evaluated(parts, desk, clock, step=step, metrics=metrics, into=evaluations)
        desk.journal.metrics(step, metrics)
        desk.progress.step(step, metrics)
        if step == recipe.run.steps or step % recipe.checkpoint.every == 0:
            save(parts, desk, clock, step=step, metrics=metrics)
        desk.journal.timeline(to_events(clock.spans, host="localhost"))
        guards.after_step(recipe.guards, metrics)
    return evaluations


async def one_step(parts: Parts, clock: Clock, *, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """One strictly on-policy step; returns its metrics and its rows for the samples file."""
    recipe, trainer = parts.recipe, parts.trainer
    version = trainer.version
    prompts = parts.prompts.take(recipe.batch.prompts)
    launches = [
        Launch(prompt=prompt, visit=visit, attempt=attempt)
        for prompt, visit in prompts
        for attempt in range(recipe.batch.samples)
    ]
    with clock.stage("generate", "generate", step=step, version=version) as counts:
        trajectories = await parts.collect(launches, temperature=recipe.engine.temperature)
        counts["groups"], counts["tokens"] = len(prompts), sum(map(guards.sampled_tokens, trajectories))
    with clock.stage("reward", "reward", step=step, version=version):
        scored = await parts.score(trajectories, min_samples=parts.algorithm.min_samples)
    guards.reward_errors(recipe.guards, scored, launched=len(launches))
    groups = [group for group in scored.groups if not parts.algorithm.drop(group)]
    with clock.stage("reference", "reference", step=step, version=version):
        streams = reference_streams(parts, groups)
    samples = credit(parts.algorithm, groups, streams)
    with clock.stage("train", "train", step=step, version=version) as counts:
        report = learn(parts, samples, step=step)
        counts["groups"], counts["tokens"] = len(groups), int(report["tokens/trained"])
        counts["shared"] = int(report["tokens/shared"])
    with clock.stage("publish", "publish", step=step, version=version):
        receipt = publish(trainer.weights(), parts.engine)
    rows = sample_rows(scored, samples, renderer=parts.renderer, environment=recipe.environment.kind, step=step)
    metrics = step_metrics(parts, scored, launched=len(launches), used=len(groups))
    return {**metrics, **report, **clock.metrics(), "weights/version": receipt.version}, list(rows)


def lacks_evaluation(recipe: Recipe, step: int, metrics: Mapping[str, float]) -> bool:
    """True if `step` should be followed by an evaluation and its metrics hold none."""
    every = recipe.evaluate.every
    due = every > 0 and (step % every == 0 or step == recipe.run.steps)
    return due and "eval/accuracy" not in metrics


async def evaluated(
    parts: Parts,
    desk: Desk,
    clock: Clock,
    *,
    step: int,
    metrics: Mapping[str, float],
    into: list[tuple[int, Evaluation]],
) -> dict[str, float]:
    """The metrics of `step` with its held-out accuracy. Interrupted, the step is kept and a resume evaluates it."""
    try:
        with clock.stage("evaluate", "generate", step=step, version=parts.trainer.version):
            evaluation = await evaluate(parts, parts.heldout, pass_k=parts.recipe.evaluate.pass_k)
    except asyncio.CancelledError:
        save(parts, desk, clock, step=step, metrics=metrics)
        raise
    into.append((step, evaluation))
    desk.progress.evaluated(step, evaluation.accuracy, *evaluation.interval)
    return {**metrics, **evaluation_metrics(evaluation)}


def evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    """An evaluation under the names of metrics.jsonl."""
    low, high = evaluation.interval
    passes = {f"eval/pass_at_{k}": chance for k, chance in evaluation.pass_at_k.items()}
    return {"eval/accuracy": evaluation.accuracy, "eval/low": low, "eval/high": high, **passes}


def save(parts: Parts, desk: Desk, clock: Clock, *, step: int, metrics: Mapping[str, float]) -> None:
    """A checkpoint of the run as it is after `step`."""
    guards.free_disk(parts.recipe.guards, desk.journal.folder)
    with clock.stage("checkpoint", "train", step=step, version=parts.trainer.version):
        path = desk.checkpoints.save(
            step,
            parts=desk.stateful,
            write_model=lambda folder: parts.policy.save(folder, base=parts.base),
            metrics=metrics,
        )
    desk.journal.event("checkpoint", step=step, path=str(path))
