"""One step, wherever the model is: on one device stage after stage, on several as their plan says.

Both give the loop the same record. A step's weights move at its end; whatever interrupts it before leaves the run as it
was, and Ctrl-C waits for what has begun to move them.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.run import guards
from stretto.run.batch import Batch
from stretto.run.clock import Clock
from stretto.run.crewed import CrewParts, take_step
from stretto.run.gather import gather
from stretto.run.interrupt import unbroken
from stretto.run.learn import learn, merged
from stretto.run.local import LocalParts
from stretto.run.parts import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step that was taken."""

    batch: Batch
    """What it learned from."""
    report: dict[str, float]
    """The trainer's numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """A step on several devices, all of it; its last update may still turn out to be no number."""

    batch: Batch
    """What it learned from."""
    reports: list[dict[str, float]]
    """The trainer's numbers, update by update."""


async def begin(parts: Parts, clock: Clock, *, step: int) -> Batch | Updated:
    """The part of a step that can be interrupted: on one device sampling, on several all of it, until weights move."""
    if isinstance(parts, LocalParts):
        return await gather(parts, clock, step=step)
    assert isinstance(parts, CrewParts)
    with clock.watch.stage("step", step, clock.last):
        work = take_step(parts, clock, step=step)
        batch, reports = await unbroken(work, once=lambda: parts.crew.applying)
    return Updated(batch=batch, reports=reports)


def finish(parts: Parts, clock: Clock, begun: Batch | Updated, *, step: int) -> Taken:
    """The rest, in which the weights move."""
    if isinstance(begun, Updated):
        guards.finite(parts.recipe.guards, begun.reports[-1], step=step)
        return Taken(batch=begun.batch, report=merged(begun.reports))
    assert isinstance(parts, LocalParts)
    trainer, version = parts.trainer, parts.version
    with clock.stage("train", "train", step=step, version=version) as counts:
        report = learn(parts, begun.samples, step=step)
        counts["groups"], counts["tokens"] = len(begun.accepted), int(report["tokens/trained"])
        counts["shared"] = int(report["tokens/shared"])
    with clock.stage("publish", "publish", step=step, version=version):
        parts.publish(trainer.weights())
        parts.engine.settle()
    return Taken(batch=begun, report=report)
