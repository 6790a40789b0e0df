"""Steps on the virtual clock for tests: small plans, made-up lengths, durations that are round numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.placement.strategies import ORDER, STRATEGIES, StrategyInputs
from stretto.scheduler.records import BufferedGroup, GroupStart, SpeedEstimate, StepSpec
from stretto.scheduler.simulator import Simulation
from stretto.scheduler.state import StepState

MAKE = {"I1" if strategy.presets else name: strategy.plan for name, strategy in STRATEGIES.items()}


@dataclass
class Clockwork:
    """Durations that follow from counts alone."""

    tick_seconds: float = 1.0
    tick_each: float = 0.0
    prefill_seconds: float = 0.0
    per_token: dict = field(default_factory=dict)
    fixed: float = 0.0
    switch_seconds: float = 2.0
    judge_seconds: float = 0.0
    apply_seconds: float = 0.0

    def tick(self, cell, active, context):
        return self.tick_seconds + self.tick_each * (active - 1)

    def prefill(self, cell, tokens):
        return self.prefill_seconds * tokens

    def piece(self, piece):
        return self.fixed + self.per_token.get(piece.stage, 1.0) * piece.tokens

    def judge(self, item):
        return self.judge_seconds

    def switch(self, move, tokens):
        return self.switch_seconds

    def apply(self, *, last):
        return self.apply_seconds


def plan_of(strategy, devices, *, stages=("train",), **layout):
    """A plan of a strategy on so many devices."""
    roles = frozenset(role for role in ORDER if role == "generate" or role in stages)
    return MAKE[strategy](StrategyInputs(devices=tuple(f"host/gpu:{i}" for i in range(devices)), roles=roles, **layout))


def terms_of(plan, groups, *, stages=("train",), slots=64, budget=100, longest=1 << 20, speeds=None, **more):
    """The terms of a step that trains on so many groups."""
    return StepSpec(
        groups=groups,
        drops=more.pop("drops", False),
        barrier=more.pop("barrier", False),
        stages=tuple(stages),
        slots={cell.name: slots for cell in plan.cells if cell.role == "generate"},
        budgets={cell.name: budget for cell in plan.cells if cell.role != "generate"},
        longest=longest,
        speeds=speeds or SpeedEstimate(),
        **more,
    )


def launches_of(lengths, *, prompt=0, expected=None):
    """Launches of groups whose trajectories will have these lengths."""
    return [
        GroupStart(
            prompt=str(index),
            prompt_tokens=prompt,
            samples=len(group),
            expected=expected or sum(group) / len(group),
        )
        for index, group in enumerate(lengths)
    ]


def carried_of(lengths, *, prompt=0):
    """Groups that the step before has made, of these lengths."""
    launches = launches_of(lengths, prompt=prompt)
    return [
        BufferedGroup(launch=each, sizes=tuple(enumerate(group))) for each, group in zip(launches, lengths, strict=True)
    ]


def simulate(
    plan,
    lengths,
    *,
    carried=(),
    durations=None,
    prompt=0,
    launched=None,
    verdict=None,
    more=None,
    expected=None,
    **terms,
):
    """The step, and what came of it; `lengths` are those of what is launched, `carried` of what was before."""
    step = StepState(plan, terms_of(plan, terms.pop("groups", len(lengths)), **terms))
    true = {(g, a): tokens for g, group in enumerate([*carried, *lengths]) for a, tokens in enumerate(group)}
    simulation = Simulation(step, durations or Clockwork(), true, verdict=verdict, more=more)
    launches = launches_of(lengths, prompt=prompt, expected=expected)
    return step, simulation.run(launches[:launched], carried_of(carried, prompt=prompt))
