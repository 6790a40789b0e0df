"""What `stretto plan` finds: where the models should live on a cluster and what a step will take.

Loads no torch, unless it is to measure. Everything else is a forecast of the cost model, with the constants that were
measured on this machine where there are any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.api.recipes import open_recipe, recipe_to_plan
from stretto.checks.machine.devices import shared_cores
from stretto.checks.machine.facts import cores
from stretto.errors import RecipeError
from stretto.placement.baselines import BASELINES
from stretto.placement.build import OPEN
from stretto.placement.cluster import Cluster, parse_cluster
from stretto.placement.devices import DEVICES, GB
from stretto.placement.strategies import STRATEGIES
from stretto.placement.written import plan_of_file, plan_of_mapping, plan_of_texts
from stretto.planner import explain
from stretto.planner.base_bits import choices, widest_base
from stretto.planner.enumerate import Variant
from stretto.planner.forecast import setting_of
from stretto.planner.given import forecast_given
from stretto.planner.problem import PlanningProblem
from stretto.planner.remedies import remedy, with_values
from stretto.planner.search import LARGEST, SearchResult, roomiest, search, smallest_cluster, variants_of
from stretto.planner.simulate import Forecast
from stretto.planner.whole_run import RunForecast, run_of, step_spread
from stretto.recipe.load import Changes, RecipeSource, cluster_path, folder_of
from stretto.recipe.schema import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastPlan:
    """One way to lay a recipe out, and what it would come to."""

    strategy: str
    """The strategy's name."""
    fits: bool
    """True if every device has room for it."""
    seconds: Mapping[str, float]
    """Seconds of a step, of its stages and of what ends it."""
    rounds: int
    """Rounds of generation that the step takes, where groups are dropped and asked anew."""
    launched: int
    """Groups of all rounds."""
    updates: int
    """Updates of the policy in the step."""
    idle: float
    """Share of the devices' seconds without work."""
    memory_gb: Mapping[str, Mapping[str, float]]
    """Device -> GB at its peak, and of what they consist."""
    tokens_per_second: float
    """Tokens of the answers."""
    cost_per_step: float | None
    """At the recipe's price per GPU and hour; none without one."""
    cells: list[dict[str, Any]]
    """Which role is on which devices, as `placement.cells` has it."""
    plan: Mapping[str, Any]
    """The rest of the plan, as in a run's plan.json."""
    why: str
    """What decides about its seconds, in words; of the best plan also on which constant its place hangs."""
    paths: Mapping[str, str]
    """How `gradients` and `weights` pass between devices: shared, file, nccl or gloo."""
    turns: Mapping[str, Any] | None
    """Of the best plan, the constant on which its place hangs, its value and where it turns; none if none is near."""
    runs_today: bool
    """True if it can be executed as things stand."""
    waits_for: list[str]
    """What of it cannot be run yet."""
    run: Mapping[str, Any]
    """What all steps and evaluations would take and cost, with an interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """Every plan that fits: those that can be executed, best first, and behind them the others."""

    recipe: Recipe
    """What was asked about."""
    found: SearchResult = field(repr=False)
    """What the planner found."""
    setting: PlanningProblem = field(repr=False)
    """What it was asked."""
    measured: Mapping[str, float] | None = None
    """Strategy -> seconds of a step that was taken, if any were."""

    @property
    def plans(self) -> list[ForecastPlan]:
        """Best first; there is at least one."""
        return [ForecastPlan(**plan) for plan in self.document()["plans"]]

    @property
    def best(self) -> ForecastPlan:
        """The fastest that can be executed, if one can."""
        return self.plans[0]

    @property
    def rejected(self) -> dict[str, str]:
        """Strategy -> why it is no choice."""
        return dict(self.found.rejected)

    def document(self) -> dict[str, Any]:
        """What `stretto plan --json` prints."""
        beside = {} if self.measured is None else {"measured": dict(self.measured)}
        told = explain.document(self.found, self.setting) | beside
        for plan, run in zip(told["plans"], self.runs, strict=True):
            plan["run"] = run.to_json()
        return told

    @property
    def runs(self) -> list[RunForecast]:
        """The whole run with each plan."""
        spread = step_spread(self.found.listed[0], self.setting)
        return [run_of(forecast, self.setting, self.recipe, spread=spread) for forecast in self.found.listed]


def planned(
    source: RecipeSource,
    *,
    cluster: str | None,
    strategy: str | None,
    changes: Changes,
    measure: bool,
    cells: str | os.PathLike[str] | Mapping[str, Any] | Sequence[str] | None = None,
    baselines: bool = False,
    note: Callable[[str], None],
) -> Plans:
    """The plans of a recipe; a RecipeError where none fits, with the smallest cluster that has one.

    `cells` is a placement of the user's own: a file, what a file holds, or texts of --mesh. It may be all that fits.
    """
    if strategy not in (None, *STRATEGIES):
        raise RecipeError.of("--strategy", f"there is no strategy {strategy!r}", f"use one of {', '.join(STRATEGIES)}")
    root = folder_of(source)
    recipe = open_recipe(source, changes, deep=False) if measure else recipe_to_plan(source, changes)
    if cluster is not None:
        section = recipe.placement.model_copy(update={"cluster": cluster_path(cluster, root)})
        recipe = recipe.model_copy(update={"placement": section})
    if measure:
        from stretto.runtime.precision import resolve_dtype

        recipe = resolve_dtype(recipe, root, note)
    there = _cluster(recipe)
    if shared := shared_cores(recipe.placement, cores()):
        note(shared)
    recipe = _with_base(recipe, root, there, note)
    setting = setting_of(recipe, root, there)
    variants = variants_of(recipe.placement, strategy)
    asked = variants + tuple(Variant(strategy=name) for name in BASELINES if baselines)
    given = None if cells is None else _given(cells, setting)
    found = search(setting, asked)
    if not found.best and (given is None or measure):
        raise _nothing(found, setting, smallest_cluster(setting, variants), remedy(recipe, root, setting, variants))
    measured: dict[str, float] | None = None
    if measure:
        measured = _measured(recipe, root, setting, found, note)
        setting = setting_of(recipe, root, there)
        given = None if cells is None else _given(cells, setting)
        found = search(setting, asked)
    found = found if given is None else found.beside(given, setting.workload)
    return Plans(recipe=recipe, found=found, setting=setting, measured=measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card that plans know."""

    name: str
    """The name in a cluster, such as L4 in 1xL4."""
    memory_gb: float
    """Memory in GB of 2^30 bytes."""
    flops: float
    """Peak of dense bf16 products, FLOP/s."""
    bandwidth: float
    """Bandwidth of its memory, bytes/s."""
    per_host: int
    """Cards of a usual host."""
    forecast: str | None
    """Seconds of a step of the recipe on one card and memory at its peak, or why there is no plan; `None` without a
    recipe."""


def cards_of(source: RecipeSource | None, changes: Changes = ()) -> list[Card]:
    """Every card of the table by memory, with a forecast of a recipe on one of each."""
    known = sorted((d for d in DEVICES.values() if d.kind.has_own_memory), key=lambda d: (d.memory, d.flops))

    def forecast(name: str) -> str | None:
        if source is None:
            return None
        try:
            found = planned(
                source, cluster=f"1x{name}", strategy=None, changes=changes, measure=False, note=lambda text: None
            )
        except RecipeError as error:
            if any(not problem.field.startswith("placement.") for problem in error.problems):
                raise
            return "does not fit" if error.problems[0].field == "placement.cluster" else "no plan"
        best = found.found.listed[0]
        peak = max(held["peak"] for held in explain.memory_gb(best, found.setting).values())
        return f"{best.step:.3g} s, {peak:.1f} GB"

    return [
        Card(
            name=device.name, memory_gb=device.memory / GB, flops=device.flops, bandwidth=device.bandwidth,
            per_host=device.per_host, forecast=forecast(device.name),
        )
        for device in known
    ]  # fmt: skip


def _with_base(recipe: Recipe, root: Path, cluster: Cluster, note: Callable[[str], None]) -> Recipe:
    """The recipe with what `model.quantize: auto` comes to on these devices; where nothing fits the fewest bits."""
    if recipe.model.quantize != "auto":
        return recipe
    kinds = choices(recipe)
    kind = widest_base(recipe, root, cluster, kinds) or kinds[-1]
    note(f"model.quantize: {kind} on {cluster}")
    return with_values(recipe, "model", quantize=kind)


def _given(cells: str | os.PathLike[str] | Mapping[str, Any] | Sequence[str], setting: PlanningProblem) -> Forecast:
    """The forecast of a placement that a user has in mind."""
    work = setting.workload
    about: dict[str, Any] = {
        "roles": work.roles,
        "devices": tuple(setting.cluster.devices),
        "reading": work.reading,
        "engine": work.engine,
        "updates": work.updates_a_step,
    }
    if isinstance(cells, Mapping):
        return forecast_given(plan_of_mapping(cells, field="cells", **about), setting, field="cells")
    if isinstance(cells, str | os.PathLike):
        return forecast_given(plan_of_file(Path(cells), **about), setting, field="--cells")
    return forecast_given(plan_of_texts(cells, **about), setting, field="--mesh")


def _measured(
    recipe: Recipe, root: Path, setting: PlanningProblem, found: SearchResult, note: Callable[[str], None]
) -> dict[str, float]:
    """Takes steps, keeps the constants that follow from them, and returns what the recipe's own plans took."""
    from stretto.bench.measure import measure
    from stretto.planner.saved_calibration import keep

    result = measure(recipe, root, setting, found, note=note)
    path = keep(result.kept)
    note(
        f"constants of {result.kept.steps} steps: the seconds of lanes and stages are told to {result.kept.error:.0%} "
        f"(before: {result.before:.0%}); kept in {path}"
    )
    return dict(result.seconds)


def _nothing(found: SearchResult, setting: PlanningProblem, count: int | None, change: str | None) -> RecipeError:
    """No plan at all: why, the smallest cluster that has one, and a change with which these devices have one."""
    if not found.weighed and count is None:  # memory is not what it fails by
        why = "; ".join(dict.fromkeys(why for _, why in found.rejected))
        fix = f"use another strategy{', or name more devices' if len(setting.names) == 1 else ''}"
        return RecipeError.of("placement.strategy", f"is out of the question: {why}", fix)
    told = found.misses or tuple(f"{name}: {why}" for name, why in found.rejected)
    kind = roomiest(setting).device.name
    adapter = "" if setting.workload.adapter else "an adapter, "
    ways = [f"{change} would do on these devices"] if change else []
    if count is not None:
        ways.insert(0, f"{'--cluster ' if kind in DEVICES else ''}{count}x{kind} would hold it")
    fix = f"{'or ' if ways else ''}use a smaller model, {adapter}shorter answers or other devices"
    larger = [f"no cluster of up to {LARGEST} x {kind} would hold it either"] if count is None else []
    fix = "; ".join((*larger, *ways, fix))
    return RecipeError.of("placement.cluster", f"nothing fits on {setting.cluster}. {'; '.join(told)}", fix)


def _cluster(recipe: Recipe) -> Cluster:
    """The recipe's cluster, which must say which devices there are."""
    text = recipe.placement.cluster
    if text in OPEN:
        fix = "say which devices, such as --cluster 8xH100, or 2xcpu for two cores of a CPU"
        raise RecipeError.of("placement.cluster", f"{text} does not say which devices there would be", fix)
    return parse_cluster(text)
