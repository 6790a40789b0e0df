"""What a run needs of the planner: the plan of `strategy: auto`, and what a plan that is given is expected to take.

The answer is that of `stretto plan`, for the devices that the run has; of all plans only those count that can be
executed as things stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stretto.errors import RecipeError
from stretto.placement.build import shares_of
from stretto.placement.cluster import Cluster
from stretto.placement.devices import GB
from stretto.placement.plan import Plan
from stretto.placement.strategies import STRATEGIES
from stretto.planner import explain
from stretto.planner.candidate import Candidate
from stretto.planner.cost.memory_fit import MemoryFit, MemoryFits
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.enumerate import Candidates
from stretto.planner.problem import ModelSplit, PlanningProblem
from stretto.planner.saved_calibration import as_measured
from stretto.planner.search import CLOSE, search, variants_of
from stretto.planner.simulate import Forecast, simulate
from stretto.planner.whole_run import evaluation_of, model_error, step_spread
from stretto.planner.workload import StepWorkload, workload_of
from stretto.recipe.schema import Placement, Recipe

SMALL = 256
"""Tokens of a small micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPlan:
    """What `auto` came to."""

    forecast: Forecast
    """The plan, and what it is expected to take."""
    why: str
    """In a line."""


def setting_of(recipe: Recipe, root: Path, cluster: Cluster) -> PlanningProblem:
    """A recipe's step on a cluster, with the constants that were measured here where there are any."""
    constants, source = as_measured(cluster)
    return PlanningProblem.of(workload_of(recipe, root), constants, source=source)


def choose(setting: PlanningProblem, section: Placement) -> AutoPlan:
    """The fastest plan that can be executed; a RecipeError if there is none."""
    found = search(setting, variants_of(section))
    if not found.ready:
        told = "; ".join(f"{name}: {why}" for name, why in found.rejected) or "no layout of it can be executed yet"
        raise RecipeError.of("placement.strategy", f"auto finds no plan: {told}", "name a strategy, such as flatten")
    first, *others = found.ready
    words = [f"{first.choice.label} on {first.choice.devices} of {len(setting.names)} devices"]
    words.append(f"{first.step:.3g} s a step expected")
    if others:
        ahead = others[0].step / first.step - 1
        words.append(f"{'about as fast as' if ahead < CLOSE else f'{ahead:.0%} ahead of'} {others[0].choice.label}")
    return AutoPlan(forecast=first, why=f"{', '.join(words)}; {explain.binding(first, setting)}")


def forecast_of(plan: Plan, setting: PlanningProblem, section: Placement, *, budget: int) -> Forecast | None:
    """What a plan is expected to take whose cells say no token budget; none for cells that no strategy makes."""
    there = setting.with_caches_of(plan)
    found = _laid(plan, there, section, budget)
    return None if found is None else simulate(StageTimes(there), *found)


def with_caches(plan: Plan, setting: PlanningProblem, section: Placement, *, budget: int) -> Plan:
    """The plan with the share of memory that is left for caches, where the engine takes what it is told."""
    found = _laid(plan, setting, section, budget)
    if found is None or found[1].share is None:
        return plan
    share = found[1].share
    cells = (replace(cell, memory_share=share) if cell.role == "generate" else cell for cell in plan.cells)
    return replace(plan, cells=tuple(cells))


def _laid(plan: Plan, setting: PlanningProblem, section: Placement, budget: int) -> tuple[Candidate, MemoryFit] | None:
    """The choice that has a plan's cells, with as large micro-batches as fit; none for cells that no strategy makes."""
    rooms = MemoryFits(setting)
    grid = Candidates(setting, StageTimes(setting), rooms)
    for variant in variants_of(section):
        for choice in grid.choices(variant, len(plan.devices)) if variant.cannot(setting) is None else ():
            if not _same(choice, plan, setting):
                continue
            for tokens in _falling(setting.workload, budget):
                mine = replace(choice, budget=tokens, recompute=bool(setting.workload.recompute))
                room = rooms.room(mine)
                if room.fits:
                    return mine, room
    return None


def _falling(work: StepWorkload, budget: int) -> list[int]:
    """This many tokens in a micro-batch and, where the recipe leaves it open, fewer and fewer."""
    least = max(work.longest, min(SMALL, budget))
    smaller = [budget >> halvings for halvings in range(20) if budget >> halvings > least]
    return [max(budget, work.longest)] if work.budget is not None else [*smaller, least]


def width_of(plan: Plan, setting: PlanningProblem, section: Placement, *, budget: int) -> tuple[int, int]:
    """Over how many devices each training cell of a strategy's plan should be cut, as few as have the room; and how
    many tokens its micro-batches may have there, because such a cell cannot make them smaller by itself.

    It is 1 where one device has the room, if only with small micro-batches and recomputing, because a cell of one
    device turns to these by itself; and where no number has.
    """
    work, rooms = setting.workload, MemoryFits(setting)
    generating, training, fitted = (
        sum(len(cell.devices) for cell in plan.cells if cell.role == role) for role in ("generate", "train", "fit")
    )
    strategy = STRATEGIES[plan.strategy]
    fractions = shares_of(section.fractions, len(plan.devices)) if strategy.presets else None
    base = Candidate(
        strategy=plan.strategy,
        devices=len(plan.devices),
        generating=generating if strategy.generates_apart else None,
        fractions=fractions,
        recompute=bool(work.recompute),
        budget=max(work.longest, budget),
    )
    least = replace(base, budget=max(work.longest, min(SMALL, budget)), recompute=work.recompute is not False)
    if rooms.room(least).fits:
        return 1, base.budget
    wide = (
        replace(base, train=ModelSplit(dp=width), budget=tokens)
        for width in range(2, training + 1)
        if not training % width and not fitted % width
        for tokens in _falling(work, budget)
    )
    fitting = (choice for choice in wide if choice.runs(work) and rooms.room(choice).fits)
    return next(((choice.train.width, choice.budget) for choice in fitting), (1, base.budget))


def _same(choice: Candidate, plan: Plan, setting: PlanningProblem) -> bool:
    """True if a choice has the cells of a plan, those that train in the same parts, and the same flow."""
    made = choice.plan(setting)
    cells, others = (
        {(cell.role, cell.devices, tuple(sorted(cell.mesh.items())) * (cell.role == "train")) for cell in each.cells}
        for each in (made, plan)
    )
    return cells == others and made.flow == plan.flow


def document(forecast: Forecast, setting: PlanningProblem, recipe: Recipe, used: Sequence[str]) -> dict[str, Any]:
    """A forecast as plan.json holds it; updates are made when weights are published."""
    return {
        "seconds": {"step": forecast.step, **forecast.stages, "publish": forecast.ending.seconds},
        "memory_gb": {device: peak for device, peak in _peaks(forecast, setting).items() if device in used},
        "rounds": forecast.rounds,
        "updates": len(forecast.updates),
        "answers": forecast.launched * setting.workload.samples,
        "idle": forecast.idle,
        "answer_tokens": forecast.tokens / setting.workload.answers,
        "cost_per_step": explain.cost(forecast, setting),
        "evaluation": evaluation_of(forecast, recipe),
        "error": model_error(setting),
        "spread": step_spread(forecast, setting),
        "constants": setting.source,
        "assumed": list(setting.workload.assumed),
    }


def _peaks(forecast: Forecast, setting: PlanningProblem) -> Mapping[str, float]:
    """Device -> GB."""
    return {
        name: forecast.held(room)[1].total / GB
        for room in forecast.room.sides
        for name in forecast.names[room.side.first : room.side.first + room.side.size]
    }
