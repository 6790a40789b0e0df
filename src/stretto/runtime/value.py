"""`stretto value`: samples the reference on every training prompt once, and keeps what its answers were worth.

It is the first half of A*PO, done before training. The answers are sampled as training would (same renderer, sampler,
environment and rewards) but with noise of their own. Every batch of answers is written as it is judged, so a table that
was interrupted is finished by the same command. On several devices all of them sample; the answers are the same.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stretto import threads
from stretto.algorithms.catalog import facts_of
from stretto.checks.own_code import import_plugins
from stretto.environments.trajectory import RolloutStart
from stretto.errors import StateLostError, StrettoError, WorkerLost
from stretto.recipe.resolve import vstar_of
from stretto.recipe.schema import Recipe
from stretto.report.console import Progress, console_for
from stretto.rewards.base import sampled_tokens
from stretto.rewards.score import Scored
from stretto.runtime import guards
from stretto.runtime.build import build_runtime
from stretto.runtime.interrupt import interrupt_answered
from stretto.runtime.plans import sampling_plan
from stretto.runtime.precision import resolve_precision
from stretto.runtime.runtime import Runtime
from stretto.runtime.schedule import sample
from stretto.runtime.session import startup_deadline
from stretto.runtime.value_table import Row, Table, add_rows, ingredients, read_table, table_path
from stretto.tasks.source import load_prompts, split_task
from stretto.types import Prompt, Trajectory
from stretto.workers.models import EngineFactory

VISIT = -2
"""V*'s own visit number, so that its noise is never that of a training sample or of an evaluation."""

TOGETHER = 256
"""Answers that are judged and written together; every engine is given as many at once, which keeps it busy."""

AGAIN = "run the same command again; it goes on where the table stands"
"""What to do when a process has died."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueResult:
    """What a table came to."""

    table: str
    """The table's file."""
    prompts: int
    """Training prompts."""
    samples: int
    """Answers per prompt that are read."""
    generated: int
    """Answers sampled just now; the others were there."""
    tokens: int
    """What the table's answers cost in all, to be counted beside the tokens of training."""
    seconds: float
    """How long it took just now."""
    reward_mean: float
    """Mean reward of the reference."""
    value_mean: float
    """Mean V*."""
    alike: int
    """Prompts whose answers all got the same reward; V* is that reward."""
    unjudged: int
    """Prompts without a verdict, which training leaves out."""


def value(
    recipe: Recipe, *, root: Path, progress: Progress | None = None, make_engine: EngineFactory | None = None
) -> ValueResult:
    """Makes the recipe's table of V*, or what is missing of it."""
    began, here = time.monotonic(), Path.cwd()
    import_plugins(recipe, root)
    section = vstar_of(recipe)
    training, _ = split_task(recipe, load_prompts(recipe.task, root))
    with interrupt_answered(), progress or console_for(sys.stdout) as screen:
        recipe = resolve_precision(recipe, root, screen.note)
        path, table, generated = threads.run(_make(recipe, training, root, here, section.samples, screen, make_engine))
        rewards = table.rewards(training, section.samples)
        values = table.values(training, section, largest=not facts_of(recipe.algorithm.name).regresses)
        return ValueResult(
            table=str(path.relative_to(here) if vstar_of(recipe).table == "auto" else path),
            prompts=len(training),
            samples=section.samples,
            generated=generated,
            tokens=table.tokens(training, section.samples),
            seconds=time.monotonic() - began,
            reward_mean=_mean([reward for found in rewards.values() for reward in found]),
            value_mean=_mean(list(values.values())),
            alike=sum(len(set(found)) == 1 for found in rewards.values()),
            unjudged=len(training) - len(rewards),
        )


async def _make(
    recipe: Recipe,
    training: Sequence[Prompt],
    root: Path,
    here: Path,
    samples: int,
    screen: Progress,
    make_engine: EngineFactory | None,
) -> tuple[Path, Table, int]:
    """The table's file, what is in it now, and how many answers are new."""
    made_from = ingredients(recipe, training, root)
    path = here / table_path(recipe, made_from, root)
    missing = read_table(path, made_from).missing(training, samples)
    if missing:
        with tempfile.TemporaryDirectory() as scratch:
            stacks = Path()  # a folder for the moment keeps none
            parts = await build_runtime(
                recipe,
                plan=sampling_plan(recipe),
                root=root,
                folder=Path(scratch),
                note=screen.note,
                make_engine=make_engine,
                stacks=stacks,
                watch=startup_deadline(recipe, stacks),
            )
            try:
                # Only now: a model from the hub has its files, which the table's name depends on, since it was loaded.
                made_from = ingredients(recipe, training, root)
                path = here / table_path(recipe, made_from, root)
                missing = _askable(parts, training, path, made_from)
                if missing:
                    await _fill(parts, missing, path, made_from, screen)
            except (WorkerLost, StateLostError) as lost:
                raise StrettoError(f"{lost}\n    fix: {AGAIN}") from lost
            finally:
                await parts.close()
    return path, read_table(path, made_from), len(missing)


def _askable(
    parts: Runtime, training: Sequence[Prompt], path: Path, made_from: dict[str, object]
) -> list[tuple[Prompt, int]]:
    """What is missing and can be asked. Prompts that the recipe drops are never trained on, so the table only says that
    there is nothing to ask of them."""
    samples, kept = vstar_of(parts.recipe).samples, {prompt.id for prompt in parts.prompts.prompts}
    table = read_table(path, made_from)
    missing = table.missing(training, samples)
    dropped = [(p.id, k) for p, k in missing if p.id not in kept and (p.id, k) not in table.rows]
    if dropped:
        add_rows(path, made_from, [Row(prompt=id, attempt=k, reward=None, tokens=0) for id, k in dropped])
    return [(prompt, attempt) for prompt, attempt in missing if prompt.id in kept]


async def _fill(
    parts: Runtime, missing: Sequence[tuple[Prompt, int]], path: Path, made_from: dict[str, object], screen: Progress
) -> None:
    """Samples and judges what is missing, batch by batch. Noise is the same whatever the recipe's seed."""
    recipe, engines = parts.recipe, sum(cell.role == "generate" for cell in parts.plan.cells)
    batches = _cut(missing, TOGETHER * engines)
    screen.note(f"table of V* {path}")
    screen.start(len(batches), 0)
    for number, batch in enumerate(batches, start=1):
        began = time.monotonic()
        launches = [RolloutStart(prompt=prompt, visit=VISIT, attempt=attempt) for prompt, attempt in batch]
        scored = await sample(parts, launches, temperature=recipe.engine.temperature, seed=0)
        rows = _rows(scored)
        add_rows(path, made_from, rows)
        guards.reward_errors(recipe.guards, scored, launched=len(launches))
        screen.step(number, _course(rows, time.monotonic() - began))


def _cut(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _rows(scored: Scored) -> list[Row]:
    """A row per trajectory."""
    judged = [
        _row(trajectory, reward.value)
        for group in scored.groups
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True)
    ]
    return [*judged, *(_row(trajectory, None) for trajectory in scored.failed)]


def _row(trajectory: Trajectory, reward: float | None) -> Row:
    tokens = sampled_tokens(trajectory)
    return Row(prompt=trajectory.prompt.id, attempt=trajectory.attempt, reward=reward, tokens=tokens)


def _course(rows: Sequence[Row], seconds: float) -> Mapping[str, float]:
    rewards = [row.reward for row in rows if row.reward is not None]
    tokens = float(sum(row.tokens for row in rows))
    return {"reward/mean": _mean(rewards), "tokens/generated": tokens, "seconds/step": seconds}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / max(1, len(numbers))
