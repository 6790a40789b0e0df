"""What the whole run of a recipe is expected to take and cost, with an interval: steps, and evaluations between them.

The interval has two parts. Steps differ because answers do: the same plan is simulated with other lengths drawn, and
over a run that averages out. The cost model is off by as much as its constants are, in the same direction at every
step: that does not average out. A table of V*, which is made before the run, is in it where the recipe says how many
prompts there are. Loading and checkpoints are not, nor that answers get longer or shorter as the model learns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any

from stretto.algorithms.catalog import facts_of
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.explain import money
from stretto.planner.problem import PlanningProblem
from stretto.planner.saved_calibration import borrowed, kept_for
from stretto.planner.simulate import Forecast, simulate
from stretto.recipe.schema import Recipe

DRAWS, FEW = 4, 1
"""Simulations with other lengths: on up to `LARGE` devices, and beyond."""
LARGE = 64
"""Devices of a cluster whose simulation takes seconds."""

PUBLISHED = 0.17
"""Median error of the cost model with its usual constants, on published measurements."""
ANOTHER = 0.6
"""The same for CPUs whose constants are another machine's: steps took 1.5 to 1.8 times what was expected."""
UNSEEN = 0.12
"""The same with constants that were measured, on workloads that they were not fitted to: the worse of two machines."""

THOUSAND = 1000
"""Prompts by which V* is priced."""

SIDES = 1.28 / 0.6745
"""An error that four of five forecasts keep within, as a multiple of the median error, where errors are normal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """A run as it is expected; four of five should be within the interval."""

    steps: int
    """Steps of the run."""
    evaluations: int
    """Evaluations of the run, that before the first step included."""
    valued: int
    """Prompts whose V* is sampled first; 0 where the algorithm reads none, or the recipe does not say how many."""
    valuing: float | None
    """Seconds of V* for a thousand prompts; none where the algorithm reads none."""
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
        parts = [f"{self.steps} steps", *[f"{self.evaluations} evaluations"] * bool(self.evaluations)]
        parts += [f"V* of {self.valued} prompts"] * bool(self.valued)
        counted = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
        told = f"{counted} take {between(self.seconds, low, high)}, {self.device_hours:.3g} device hours"
        if self.cost is not None and self.cost_interval is not None:
            cheap, dear = map(money, self.cost_interval)
            told += f", and cost {money(self.cost)} ({cheap} to {dear})"
        if self.valuing is not None and not self.valued:
            told += f"; a table of V* takes {duration(self.valuing)} more for each 1,000 prompts"
        return told

    def to_json(self) -> dict[str, Any]:
        """The forecast as plain data."""
        return asdict(self)


def run_of(
    forecast: Forecast, setting: PlanningProblem, recipe: Recipe, *, spread: float | None = None, values: bool = True
) -> RunForecast:
    """The run with this plan; `spread` is the relative one of its steps where that is known. Without `values`, a table
    of V* is there already."""
    spread = step_spread(forecast, setting) if spread is None else spread
    samples = vstar_samples(recipe) if values else None
    return forecast_run(
        recipe,
        step=forecast.step,
        evaluation=evaluation_of(forecast, recipe),
        valuing=None if samples is None else generated(forecast, THOUSAND, samples, everywhere=True),
        spread=spread,
        error=model_error(setting),
        devices=len(setting.cluster),
    )


def evaluation_of(forecast: Forecast, recipe: Recipe) -> float:
    """Seconds of one evaluation with this plan; 0 where there is none."""
    section = recipe.evaluate
    if not section.every:
        return 0.0
    held = recipe.task.holdout.prompts
    prompts = section.limit if held == "auto" else min(section.limit, held)
    return generated(forecast, prompts, section.pass_k + (section.pass_k > 1))


def generated(forecast: Forecast, prompts: int, samples: int, *, everywhere: bool = False) -> float:
    """Seconds in which a plan's lanes generate so many answers together: an evaluation; `everywhere`, with such lanes
    on all of its devices, as a table of V* is made."""
    choice, setting = forecast.choice, forecast.setting
    if everywhere:
        choice = replace(choice, strategy="flatten", fractions=None, generating=None)
    work = replace(setting.workload, prompts=prompts, samples=samples, oversample=1.0, acceptance=None)
    return StageTimes(replace(setting, workload=work)).generate(choice, forecast.room.pool)


def vstar_samples(recipe: Recipe) -> int | None:
    """Answers that V* of a prompt is made of; none where the algorithm reads none, or the recipe names its table."""
    section = getattr(recipe.algorithm, "vstar", None)
    reads = "vstar" in facts_of(recipe.algorithm.name).needs
    return section.samples if reads and section is not None and section.table == "auto" else None


def forecast_run(
    recipe: Recipe,
    *,
    step: float,
    evaluation: float,
    spread: float,
    error: float,
    devices: int,
    valuing: float | None = None,
) -> RunForecast:
    """A run of steps and evaluations that take so long each; `valuing` is what V* of a thousand prompts takes."""
    steps, section = recipe.run.steps, recipe.evaluate
    evaluations = len({*range(0, steps, section.every), steps}) if section.every else 0
    count = getattr(recipe.task.source, "count", 0)
    prompts = 0 if count == "auto" else max(0, count - recipe.held_out(count))
    valued = 0 if valuing is None else prompts
    stepping = steps * step
    # Twice as long and half as long are as far off.
    seconds = stepping + evaluations * evaluation + valued / THOUSAND * (valuing or 0.0)
    factor = 1 + math.hypot(SIDES * error, 1.28 * spread / math.sqrt(max(1, steps)) * stepping / seconds)
    interval = (seconds / factor, seconds * factor)
    price = recipe.placement.price_per_gpu_hour
    hourly = None if price is None else price * devices / 3600
    return RunForecast(
        steps=steps,
        evaluations=evaluations,
        valued=valued,
        valuing=valuing,
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
    if kept is not None:
        return max(UNSEEN, kept.error)
    return ANOTHER if borrowed(setting.cluster) else PUBLISHED


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
