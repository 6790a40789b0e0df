"""What the whole run of a recipe is expected to take and cost, with an interval: steps, and evaluations between them.

The interval has two parts. Steps differ because answers do: the same plan is simulated with other lengths drawn, and
over a run that averages out. The cost model is off by as much as its constants are, in the same direction at every
step: that does not average out. Loading, checkpoints and a table of V* are not in it, nor that answers get longer or
shorter as the model learns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.explain import money
from stretto.planner.problem import PlanningProblem
from stretto.planner.saved_calibration import kept_for
from stretto.planner.simulate import Forecast, simulate
from stretto.recipe.schema import Recipe

DRAWS, FEW = 4, 1
"""Simulations with other lengths: on up to `LARGE` devices, and beyond."""
LARGE = 64
"""Devices of a cluster whose simulation takes seconds."""

PUBLISHED = 0.17
"""Median error of the cost model with its usual constants, on published measurements."""

SIDES = 1.28 / 0.6745
"""An error that four of five forecasts keep within, as a multiple of the median error, where errors are normal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """A run as it is expected; four of five should be within the interval."""

    steps: int
    """Steps of the run."""
    evaluations: int
    """Evaluations of the run, that before the first step included."""
    seconds: float
    """Seconds of all of them."""
    interval: tuple[float, float]
    """Between which seconds."""
    device_hours: float
    """The same, times all devices of the cluster."""
    cost: float | None
    """At the recipe's price of a device per hour; none without one."""
    cost_interval: tuple[float, float] | None
    """Between which costs."""

    def __str__(self) -> str:
        low, high = self.interval
        evaluations = f" and {self.evaluations} evaluations" if self.evaluations else ""
        told = f"{self.steps} steps{evaluations} take {between(self.seconds, low, high)}"
        if self.cost is None or self.cost_interval is None:
            return f"{told}, {self.device_hours:.3g} device hours"
        cheap, dear = map(money, self.cost_interval)
        return f"{told}, {self.device_hours:.3g} device hours, and cost {money(self.cost)} ({cheap} to {dear})"

    def to_json(self) -> dict[str, Any]:
        """The forecast as plain data."""
        return asdict(self)


def run_of(forecast: Forecast, setting: PlanningProblem, recipe: Recipe, *, spread: float | None = None) -> RunForecast:
    """The run with this plan; `spread` is the relative one of its steps where that is known."""
    spread = step_spread(forecast, setting) if spread is None else spread
    generate, answers = forecast.stages.get("generate", 0.0), forecast.launched * setting.workload.samples
    return forecast_run(
        recipe,
        step=forecast.step,
        answer=generate / max(1, answers),
        spread=spread,
        error=model_error(setting),
        devices=len(setting.cluster),
    )


def forecast_run(
    recipe: Recipe, *, step: float, answer: float, spread: float, error: float, devices: int
) -> RunForecast:
    """A run of steps that take so long; `answer` is what each answer of an evaluation takes."""
    steps, section = recipe.run.steps, recipe.evaluate
    evaluations = len({*range(0, steps, section.every), steps}) if section.every else 0
    each = section.prompts * (section.pass_k + (section.pass_k > 1))
    stepping, evaluating = steps * step, evaluations * each * answer
    apart = math.hypot(SIDES * error, 1.28 * spread / math.sqrt(max(1, steps)) * stepping / (stepping + evaluating))
    # Twice as long and half as long are as far off.
    seconds, factor = stepping + evaluating, 1 + apart
    interval = (seconds / factor, seconds * factor)
    price = recipe.placement.price_per_gpu_hour
    hourly = None if price is None else price * devices / 3600
    return RunForecast(
        steps=steps,
        evaluations=evaluations,
        seconds=seconds,
        interval=interval,
        device_hours=seconds * devices / 3600,
        cost=None if hourly is None else seconds * hourly,
        cost_interval=None if hourly is None else (interval[0] * hourly, interval[1] * hourly),
    )


def step_spread(forecast: Forecast, setting: PlanningProblem) -> float:
    """Standard deviation of a step's seconds over draws of lengths, as a share of their mean."""
    draws = DRAWS if len(setting.cluster) <= LARGE else FEW
    return relative_spread([forecast.step, *(_again(forecast, seed) for seed in range(1, 1 + draws))])


def relative_spread(seconds: Sequence[float]) -> float:
    """Standard deviation as a share of the mean; 0 of a single number."""
    return stdev(seconds) / fmean(seconds) if len(seconds) > 1 else 0.0


def _again(forecast: Forecast, seed: int) -> float:
    """Seconds of a step of the same plan, with other lengths."""
    work = forecast.setting.workload
    other = replace(forecast.setting, workload=replace(work, seed=work.seed + seed))
    return simulate(StageTimes(other), forecast.choice, forecast.room).step


def model_error(setting: PlanningProblem) -> float:
    """Median error of the cost model with the constants that it has here."""
    kept = kept_for(setting.cluster)
    return PUBLISHED if kept is None else kept.error


def duration(seconds: float) -> str:
    """Seconds in the unit that people would use."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def between(seconds: float, low: float, high: float) -> str:
    """A duration with its interval, in one unit where that is the same."""
    told, least, most = map(duration, (seconds, low, high))
    unit = told.partition(" ")[2]
    least = least.removesuffix(f" {unit}") if most.endswith(unit) else least
    return f"{told} ({least} to {most})"
