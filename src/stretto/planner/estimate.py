"""Seconds of a step by closed forms: to decide which choices are worth a simulation, never to rank those that were.

Stages are whole and undisturbed here. What tails, idle cells and streams of groups really do, the simulation knows.
"""

from __future__ import annotations

import math

from stretto.placement import closed_forms as closed
from stretto.placement.closed_forms import Stages
from stretto.planner.candidate import Candidate
from stretto.planner.cost.stage_times import StageTimes, StepEnd
from stretto.scheduler.records import FORWARD, UPDATE

STREAM = 8
"""Parts in which a stream of groups is taken to arrive."""


def estimate(prices: StageTimes, choice: Candidate, pool: float = math.inf) -> float:
    """Seconds of a step, with room for so many tokens in the caches of a lane; by default with all that they need."""
    work, ending = prices.setting.workload, prices.ending(choice)
    at = stages(prices, choice, pool, ending)
    if choice.strategy == "separate":
        if work.staleness:
            return max(at.generate, at.forwards + at.train - ending.update) + ending.seconds
        pieces = 1 if work.barrier or work.updates > 1 else min(STREAM, work.prompts)
        return closed.pipeline([at.generate, at.forwards + at.train - ending.update], pieces) + ending.seconds
    if choice.strategy == "elastic" and not work.barrier:
        lanes = max(1, choice.devices // choice.lane.width)
        tail = at.generate / 2
        return closed.elastic(
            at,
            ranks=lanes,
            moved=lanes // 2,
            tail=tail,
            slower_tail=tail,
            ready=0.5,
            costs=prices.costs.rates.far_delay,
        )
    return closed.flatten(at)


def stages(prices: StageTimes, choice: Candidate, pool: float, ending: StepEnd) -> Stages:
    """The stages; what lies side by side takes as long as the slower side, and is told as one stage."""
    separate = choice.strategy == "separate"
    return Stages(
        generate=prices.generate(choice, pool),
        old=prices.slowest(choice, FORWARD),
        train=prices.slowest(choice, UPDATE) + ending.update,
        publish=ending.publish,
        switch=ending.switch if separate else ending.switch / 2,
    )
