"""Seconds of a step by closed forms: to decide which choices are worth a simulation, never to rank those that were.

Stages are whole and undisturbed here. What tails, idle cells and streams of groups really do, the simulation knows.
"""

from __future__ import annotations

import math

from stretto.placement.baselines import record_of
from stretto.placement.closed_forms import Stages, StepFlow
from stretto.planner.candidate import Candidate
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.cost.step_end import StepEnd
from stretto.scheduler.records import FORWARD, UPDATE

STREAM = 8
"""Parts in which a stream of groups is taken to arrive."""


def estimate(prices: StageTimes, choice: Candidate, pool: float = math.inf) -> float:
    """Seconds of a step, with room for so many tokens in the caches of a lane; by default with all that they need."""
    work, ending = prices.setting.workload, prices.ending(choice)
    # Of several updates nothing is trained before it is known who is trained on, and when.
    together = choice.waits(work) or work.several
    flow = StepFlow(
        pieces=1 if together else min(STREAM, work.prompts),
        barrier=together,
        staleness=work.staleness,
        lanes=choice.lanes(work.roles),
        update=ending.update,
        moving=prices.costs.rates.far_delay,
    )
    return record_of(choice.strategy).seconds(stages(prices, choice, pool, ending), flow)


def stages(prices: StageTimes, choice: Candidate, pool: float, ending: StepEnd) -> Stages:
    """The stages; what lies side by side takes as long as the slower side, and is told as one stage."""
    return Stages(
        generate=prices.generate(choice, pool),
        old=prices.slowest(choice, FORWARD),
        train=prices.slowest(choice, UPDATE) + ending.update,
        publish=ending.publish,
        switch=ending.switch / 2,
    )
