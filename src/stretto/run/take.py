"""One step, wherever the model is: on one device stage after stage, on several as their plan says.

Both give the loop the same record. A step's weights move at its very end; whatever interrupts it before leaves the run
as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.run import guards
from stretto.run.batch import Batch
from stretto.run.clock import Clock
from stretto.run.crewed import CrewParts, take_step
from stretto.run.gather import gather
from stretto.run.learn import learn
from stretto.run.local import LocalParts
from stretto.run.parts import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step that was taken."""

    batch: Batch
    """What it learned from."""
    report: dict[str, float]
    """The trainer's numbers."""


async def begin(parts: Parts, clock: Clock, *, step: int) -> Batch | Taken:
    """The part of a step whose failure leaves the run as it was: on one device sampling, on several all of it."""
    if isinstance(parts, LocalParts):
        return await gather(parts, clock, step=step)
    assert isinstance(parts, CrewParts)
    with clock.watch.stage("step", step, clock.last):
        batch, report = await take_step(parts, clock, step=step)
    return Taken(batch=batch, report=report)


def finish(parts: Parts, clock: Clock, begun: Batch | Taken, *, step: int) -> Taken:
    """The rest, in which the weights move."""
    if isinstance(begun, Taken):
        guards.finite(parts.recipe.guards, begun.report, step=step)
        return begun
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
