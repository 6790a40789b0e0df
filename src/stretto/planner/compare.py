"""Where the seconds go that one plan takes more than another: generation, scoring and training, waiting, the end.

A step is what a device does, what ends it, and waiting; so the difference of two steps is the sum of four differences,
and the largest of them is the reason.
"""

from __future__ import annotations

from stretto.placement.baselines import record_of
from stretto.placement.strategies import DEFAULT, STRATEGIES
from stretto.planner.problem import ModelSplit
from stretto.planner.simulate import Forecast
from stretto.planner.workload import StepWorkload
from stretto.scheduler.records import role_of

NOTICED = 0.01
"""A plan that takes this share more than another is slower."""


def usual_of(forecast: Forecast, others: tuple[Forecast, ...]) -> Forecast | None:
    """The plan with stages that wait for each other, of one whose stages flow over the same devices."""
    strategy, usual = record_of(forecast.choice.strategy), STRATEGIES[DEFAULT]
    if strategy is usual or strategy.places is not usual.places:
        return None
    return next((other for other in others if other.choice.strategy == DEFAULT), None)


def slower_because(mine: Forecast, other: Forecast, work: StepWorkload) -> str | None:
    """Why the first plan is slower than the second; none if it is not."""
    gap = mine.step - other.step
    if gap <= NOTICED * other.step:
        return None
    parts = {name: seconds - parts_of(other, work)[name] for name, seconds in parts_of(mine, work).items()}
    name = max(parts, key=parts.__getitem__)
    reason = {
        "generating": _generating,
        "scoring and training": _training,
        "waiting": _waiting,
        "the end of a step": _ending,
    }[name]
    told = f"{gap / other.step:.1%} slower than {other.choice.label} ({gap:.3g} s)"
    return f"{told}, above all in {name} ({parts[name]:+.3g} s): {reason(mine, other, work)}"


def parts_of(forecast: Forecast, work: StepWorkload) -> dict[str, float]:
    """Seconds of the average device; they add up to the step."""
    used = forecast.choice.devices
    places = forecast.choice.places(work.roles)

    def of_all(stage: str) -> float:
        return forecast.stages[stage] * places[role_of(stage)][1] / used

    generating = of_all("generate")
    training = sum(of_all(stage) for stage in forecast.stages if stage != "generate")
    ending = forecast.ending.seconds
    return {
        "generating": generating,
        "scoring and training": training,
        "the end of a step": ending,
        "waiting": forecast.step - generating - training - ending,
    }


def _generating(mine: Forecast, other: Forecast, work: StepWorkload) -> str:
    held, there = (each.slots * each.choice.lanes(work.roles) for each in (mine, other))
    if held < min(there, work.answers):
        return f"caches hold {held} answers at a time, not {there}, because what trains stays beside them"
    if mine.choice.lane != other.choice.lane:
        return f"lanes of {_apart(mine.choice.lane, other.choice.lane)}, are what fits beside what trains"
    return "lanes read prompts again that move"


def _training(mine: Forecast, other: Forecast, work: StepWorkload) -> str:
    if mine.choice.recompute and not other.choice.recompute:
        return "activations are recomputed, because memory is short beside engines that stay"
    if mine.choice.budget < other.choice.budget:
        return f"micro-batches of {mine.choice.budget} tokens, not {other.choice.budget}, are what has room"
    if mine.choice.train != other.choice.train:
        told = _apart(mine.choice.train, other.choice.train)
        return f"its training cells have {told}, so that they fit beside engines that stay"
    return "pieces are packed of groups as they finish, so they are smaller and dealt out less evenly"


def _apart(mine: ModelSplit, other: ModelSplit) -> str:
    """How many devices a cell has, and how the other is different."""
    return f"{mine.width} devices, {'cut otherwise' if mine.width == other.width else f'not {other.width}'}"


def _waiting(mine: Forecast, other: Forecast, work: StepWorkload) -> str:
    wide, lane = mine.choice.train.width, mine.choice.lane.width
    if wide > lane:
        return f"a training cell begins when all lanes of its {wide} devices are done"
    return "cells wait for the last pieces, which are dealt out as they come"


def _ending(mine: Forecast, other: Forecast, work: StepWorkload) -> str:
    if mine.choice.sleeps and mine.ending.switch > other.ending.switch:
        return "the optimizer comes back from host memory for the update"
    if mine.choice.devices != other.choice.devices:
        return f"it uses {mine.choice.devices} devices, not {other.choice.devices}"
    return "another layout takes longer to update and to publish"
