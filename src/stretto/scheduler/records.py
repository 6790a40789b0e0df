"""What goes into the scheduler and what comes out of it: plain records, made by drivers and by
`stretto.scheduler.state`.

Into it: `GroupStart` (a group to make), `BufferedGroup` (one that was made) and `StepSpec` (what holds for the whole
step). Out of it: work. A *lane* is open-ended generation on a cell, which trajectories join and leave; a *piece* is
bounded work of any other stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

RolloutId = tuple[int, int]
"""A trajectory: (index of its group in launch order, attempt)."""

FORWARD = ("reward", "reference", "value", "old")
"""Stages that look at finished trajectories, and are bounded pieces on cells. *old* is what the policy says of them
while its weights are those that sampled: before the first of several updates, or before they lag behind."""

UPDATE = ("train", "fit")
"""Stages that accumulate gradients."""


def role_of(stage: str) -> str:
    """The role of the cells that serve a stage."""
    return "train" if stage == "old" else stage


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStart:
    """A group of trajectories to make. Nothing here says how long they will truly be."""

    prompt: str
    """The prompt's id."""
    prompt_tokens: int
    """Length of the context that its trajectories share."""
    samples: int
    """How many trajectories."""
    expected: float
    """Tokens that each is expected to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedGroup:
    """A group that the step before has generated and accepted for this one to train on."""

    launch: GroupStart
    """What it was."""
    sizes: tuple[tuple[int, int], ...]
    """(attempt, generated tokens) of each trajectory to train on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimate:
    """Seconds as last measured or predicted; decisions weigh with them, results do not depend on them."""

    tick: float = 0.01
    """Seconds of a decode step of one sequence."""
    tick_each: float = 0.0
    """Seconds that every further sequence adds to it."""
    per_token: Mapping[str, float] = field(default_factory=dict)
    """Stage -> seconds per token of its pieces."""
    switch: float = 1.0
    """Seconds to go on with trajectories on another cell, beside computing what they have again."""
    again: float = 0.0
    """Seconds per token of that; the other cell decodes nothing meanwhile."""
    relative: Mapping[str, float] = field(default_factory=dict)
    """Cell -> how many times as fast as the mean of its role; the others are as fast as that."""

    def on(self, cell: str) -> SpeedEstimate:
        """The speeds of a generate cell."""
        faster = self.relative.get(cell, 1.0)
        if faster == 1.0:
            return self
        seconds = {name: getattr(self, name) / faster for name in ("tick", "tick_each", "again")}
        return replace(self, **seconds)

    def tick_of(self, active: int) -> float:
        """Seconds of a decode step of so many sequences."""
        return self.tick + self.tick_each * (active - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """What holds for a whole step."""

    groups: int
    """How many groups the step trains on, if so many survive."""
    drops: bool
    """True if a verdict may drop a group."""
    barrier: bool
    """True if credit needs every accepted group (scope "batch")."""
    stages: tuple[str, ...]
    """Which of `FORWARD` and `UPDATE` the step needs."""
    slots: Mapping[str, int]
    """Generate cell -> trajectories that it takes at once."""
    budgets: Mapping[str, int]
    """Other cell -> most tokens in a piece."""
    longest: int
    """Most tokens that a trajectory may generate."""
    divides: bool = False
    """True if a step makes several updates, each of a part of its trajectories, once all of them are known."""
    speeds: SpeedEstimate = field(default_factory=SpeedEstimate)
    """For decisions about the tail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRollouts:
    """These trajectories start on a generate cell now; the lane opens with the first of them."""

    cell: str
    """Which."""
    items: tuple[RolloutId, ...]
    """What starts, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRollouts:
    """These trajectories leave one generate cell and go on, by their tokens, on another."""

    source: str
    """The cell that they leave; its queue is closed then."""
    target: str
    """The cell that they join."""
    items: tuple[RolloutId, ...]
    """What moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """One packed micro-batch of a stage on a cell; never interrupted."""

    number: int
    """Counts the pieces of a step."""
    cell: str
    """Which."""
    stage: str
    """One of `FORWARD` or `UPDATE`."""
    items: tuple[RolloutId, ...]
    """Trajectories in it, those of a group together."""
    tokens: int
    """Tokens that it computes, prompts of a group once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitUpdates:
    """It is known who is trained on: which of them make which update?"""

    groups: tuple[int, ...]
    """The accepted groups, in launch order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyUpdate:
    """Everything of an update is accumulated: reduce over the training cells, update; after the last one publish."""

    groups: tuple[int, ...]
    """The accepted groups, in launch order."""
    last: bool = True
    """False if another update follows in this step."""


Work = StartRollouts | MoveRollouts | StageWork | SplitUpdates | ApplyUpdate
