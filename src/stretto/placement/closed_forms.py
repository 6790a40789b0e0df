"""Seconds of a step by strategy, from the seconds of its stages: closed forms, to prune and to test the simulator.

They assume fixed lengths, stages that nothing disturbs and whole groups that arrive evenly. The scheduler on its
virtual clock knows better and is what plans are ranked by; with these assumptions it must give the same numbers. The
critic-free cases leave out the critic's times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Seconds of each stage of a step on the devices that serve it; 0 for one that does not take place."""

    generate: float
    """All answers, on the lanes that generate."""
    old: float = 0.0
    """The policy's log-probabilities, where they are computed again."""
    reference: float = 0.0
    """The reference's log-probabilities."""
    reward: float = 0.0
    """The reward model's verdicts."""
    value: float = 0.0
    """The critic's values."""
    train: float = 0.0
    """The policy's updates."""
    fit: float = 0.0
    """The critic's updates."""
    publish: float = 0.0
    """New weights into the engines."""
    switch: float = 0.0
    """One change between generating and training on the same devices."""

    @property
    def forwards(self) -> float:
        """Everything between generating and training, one after the other."""
        return self.old + self.reference + self.reward + self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFlow:
    """What else a closed form asks of a step."""

    pieces: int
    """Equal parts in which answers arrive; 1 where training waits for the last of them."""
    barrier: bool
    """Whether credit needs all answers of the step."""
    staleness: int
    """Versions by which generation is ahead."""
    lanes: int
    """Cells that generate."""
    update: float
    """Seconds of `Stages.train` that follow its last gradient."""
    moving: float
    """Seconds until a cell has turned to other work."""


def one_after_the_other(at: Stages, step: StepFlow) -> float:
    """Stages wait for each other; what lies side by side is told as one stage."""
    return flatten(at)


def side_by_side(at: Stages, step: StepFlow) -> float:
    """Generation beside everything else: a stream of groups, or the next step's answers beside this step's training."""
    training = at.forwards + at.train - step.update
    ending = step.update + at.publish + 2 * at.switch
    if step.staleness:
        return max(at.generate, training) + ending
    return pipeline([at.generate, training], step.pieces) + ending


def with_moving_tails(at: Stages, step: StepFlow) -> float:
    """Half of the lanes turn to training when half of the generation remains."""
    if step.barrier:
        return flatten(at)
    tail = at.generate / 2
    return elastic(
        at, ranks=step.lanes, moved=step.lanes // 2, tail=tail, slower_tail=tail, ready=0.5, costs=step.moving
    )


def flatten(at: Stages) -> float:
    """Every role on all devices, one stage after the other."""
    return at.generate + at.forwards + at.train + at.fit + at.publish + 2 * at.switch


def pipeline(stages: Sequence[float], pieces: int, sync: float = 0.0) -> float:
    """Separation: a step's work flows in equal pieces through stages on devices of their own, each taking this long."""
    each = [stage / pieces for stage in stages]
    return sync + sum(each) + (pieces - 1) * max(each, default=0.0)


def elastic(
    at: Stages, *, ranks: int, moved: int, tail: float, slower_tail: float, ready: float, costs: float
) -> float:
    """All devices generate; when `tail` seconds remain, `moved` of `ranks` turn to training what is complete.

    The tail takes `slower_tail` on the devices that stay. `ready` is the share of the step's training that is complete
    by then on average; `costs` is what moving takes. Nothing is gained beyond the moved devices' share of the tail.
    """
    training = at.forwards + at.train + at.fit
    free = max(0.0, slower_tail - costs) * moved / ranks
    early = min(ready * training, free)
    return at.generate - tail + slower_tail + training - early + at.publish + 2 * at.switch
