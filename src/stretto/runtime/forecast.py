"""What a run was expected to take, beside what it took: the numbers of plan.json and the table at its end.

The forecast is the planner's. On several devices it is made before anything is loaded, because the placement depends
on it. Before the first step it is made again, with measured prompts and the environment's turns (`expected_lengths`).
After ten steps the rest of the run is forecast from measured steps. Measured numbers are medians of the run's metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from stretto.algorithms.catalog import learns_from_rows
from stretto.errors import RecipeError
from stretto.placement.devices import kind_of
from stretto.placement.plan import Plan
from stretto.planner import forecast as foresee
from stretto.planner.explain import money
from stretto.planner.problem import PlanningProblem
from stretto.planner.saved_calibration import ELSEWHERE
from stretto.planner.whole_run import between, duration, forecast_run
from stretto.recipe.schema import Recipe
from stretto.runtime.base_copy import Note
from stretto.runtime.build import token_budget
from stretto.runtime.cpu_threads import reward_worker_count
from stretto.runtime.expected_lengths import ExpectedLengths, expected_lengths
from stretto.runtime.plans import cluster_of_run, devices_of, make_plan
from stretto.runtime.runtime import Runtime
from stretto.storage.atomic import replace as replace_file
from stretto.storage.atomic import to_json
from stretto.storage.json_lines import numbers_of, read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A plan, and what is expected of it."""

    plan: Plan
    """Where everything lives."""
    expected: Mapping[str, Any] | None
    """The forecast, as plan.json has it; none where none was made."""
    reward_workers: int
    """Processes that run reward functions."""
    corrected: Mapping[str, Any] | None = None
    """Forecast of the rest of the run from measured steps; `None` before them."""

    def to_json(self) -> dict[str, Any]:
        """The planned run, as plan.json holds it."""
        told = {**self.plan.to_json(), "reward_workers": self.reward_workers}
        told |= {} if self.expected is None else {"predicted": dict(self.expected)}
        return told | ({} if self.corrected is None else {"corrected": dict(self.corrected)})


def planned(recipe: Recipe, root: Path, note: Note) -> PlannedRun:
    """The plan of a run. On several devices `auto` is the planner's choice, told with its reason."""
    section, workers = recipe.placement, reward_worker_count(recipe)
    if len(devices_of(section)) == 1 or learns_from_rows(recipe.algorithm.name):
        plan = _with_caches(recipe, root, make_plan(recipe))
        return PlannedRun(plan=plan, expected=None, reward_workers=workers)
    if section.strategy == "auto" and section.cells is None:
        try:
            setting = foresee.setting_of(recipe, root, cluster_of_run(recipe))
            chosen = foresee.choose(setting, section)
        except RecipeError as error:
            note(f"plan: flatten, because the planner has no answer ({error.reasons})")
        else:
            told = [setting.source or "usual constants", *setting.workload.assumed[:1]]
            note(f"plan: {chosen.why} ({'; '.join(told)})")
            plan = chosen.forecast.plan
            if getattr(recipe.engine, "graphs", False) is True and any(map(plan.generates_together, plan.devices)):
                note("plan: devices that generate together record no steps, so that engine.graphs has no effect")
            expected = foresee.document(chosen.forecast, setting, recipe, plan.devices)
            return PlannedRun(plan=plan, expected=expected, reward_workers=workers)
    known = _setting(recipe, root)
    plan = _with_caches(recipe, root, widened(recipe, known, note), known)
    return PlannedRun(plan=plan, expected=expectation(recipe, known, plan), reward_workers=workers)


def _with_caches(recipe: Recipe, root: Path, plan: Plan, setting: PlanningProblem | None = None) -> Plan:
    """A strategy's plan with the share of each GPU that is left for caches, where the planner can tell. CPUs, and cells
    by hand that say none, go on with the engine's usual share."""
    gpus = all(kind_of(device).has_own_memory for device in plan.devices)
    if not gpus or recipe.placement.cells is not None or learns_from_rows(recipe.algorithm.name):
        return plan
    setting = setting or _setting(recipe, root)
    if setting is None:
        return plan
    return foresee.with_caches(plan, setting, recipe.placement, budget=_usual(recipe, setting))


def widened(recipe: Recipe, setting: PlanningProblem | None, note: Note) -> Plan:
    """The plan that a recipe names; training cells of a strategy get more devices where one is too small."""
    plan = make_plan(recipe)
    if setting is None or recipe.placement.cells is not None or recipe.placement.strategy == "auto":
        return plan
    usual = _usual(recipe, setting)
    width, tokens = foresee.width_of(plan, setting, recipe.placement, budget=usual)
    if width == 1:
        return plan
    smaller = f", in micro-batches of {tokens} tokens" if tokens < usual else ""
    why = "because one device is too small for it"
    note(f"plan: {width} devices train one copy together, each with a slice{smaller}, {why}")
    plan = make_plan(recipe, width=width)
    cells = (replace(cell, token_budget=tokens) if len(cell.devices) > 1 else cell for cell in plan.cells)
    return replace(plan, cells=tuple(cells)) if smaller else plan


def expectation(
    recipe: Recipe, setting: PlanningProblem | None, plan: Plan, lengths: ExpectedLengths | None = None
) -> dict[str, Any] | None:
    """Return the forecast of a step with a plan, of these lengths or the planner's; `None` where the planner has none,
    such as for a server that stretto did not start."""
    if setting is None or setting.workload.served:
        return None
    if lengths is not None:
        setting = replace(setting, workload=lengths.within(setting.workload))
    budget = max((cell.token_budget for cell in plan.cells if cell.token_budget), default=_usual(recipe, setting))
    forecast = foresee.forecast_of(plan, setting, recipe.placement, budget=budget)
    if forecast is None:
        return None
    found = foresee.document(forecast, setting, recipe, plan.devices)
    return found if lengths is None else lengths.of_trajectories(found)


# Its start and its correction ----------------------------------------------------------------------------------------


def forecast_at_start(
    parts: Runtime, course: PlannedRun, root: Path, folder: Path, *, done: int, note: Note
) -> PlannedRun:
    """Print the forecast of the steps after `done`, write it to plan.json, and return the planned run with it."""
    recipe = parts.recipe
    if parts.data is not None:
        return course
    rows = [numbers_of(row) for row in read_rows(folder / "metrics.jsonl")] if done else []
    lengths = expected_lengths(
        recipe,
        root,
        prompts=parts.prompts.prompts,
        renderer=parts.renderer,
        environment=parts.environment,
        context=parts.context,
        sampled=[{name: value for name, value in row.items() if value is not None} for row in rows],
    )
    expected = expectation(recipe, _setting(recipe, root), parts.plan, lengths)
    for line in _lines(recipe, expected, lengths, done=done):
        note(f"forecast: {line}")
    if expected is None:
        return course
    course = replace(course, expected=expected)
    write(folder, course, None)
    return course


def _lines(recipe: Recipe, expected: Mapping[str, Any] | None, lengths: ExpectedLengths, *, done: int) -> Iterator[str]:
    """The forecast in words; without an interval, because none was shown to hold for measured or assumed lengths."""
    if expected is not None:
        step, evaluation = expected["seconds"]["step"], expected["evaluation"]
        seconds, counted = _rest(recipe, step=step, evaluation=evaluation, after=done, pending=done == 0)
        speed = expected["constants"]
        measured = speed is not None and speed != ELSEWHERE
        words = "" if measured else " (assumed: device speed; `stretto plan --measure` measures it)"
        yield f"{duration(step)} per step, {duration(seconds)} for {counted}{words}"
    yield str(lengths)


def _rest(recipe: Recipe, *, step: float, evaluation: float, after: int, pending: bool) -> tuple[float, str]:
    """Seconds of the steps after `after` and the evaluations between them, and both counted in words."""
    steps, every = recipe.run.steps - after, recipe.evaluate.every
    due = {each for each in range(after + 1, recipe.run.steps + 1) if each % every == 0} if every else set()
    due |= {recipe.run.steps} if every and steps else set()
    evaluations = len(due) + (pending and every > 0)
    counted = f"{steps} step{'s' * (steps != 1)}"
    if evaluations:
        counted += f" and {evaluations} evaluation{'s' * (evaluations != 1)}"
    return steps * step + evaluations * evaluation, counted


MEASURED = 10
"""Number of steps of a session after which the forecast is corrected."""


class ForecastCorrection:
    """Replaces the forecast of the rest of a run by one from measured steps, once."""

    def __init__(self, recipe: Recipe, course: PlannedRun, folder: Path) -> None:
        """`course` is the run with the forecast of its start."""
        self.recipe, self.course, self.folder = recipe, course, folder
        self._steps: list[Mapping[str, float]] = []
        self._evaluations: list[float] = []

    def seen(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Take the metrics of a step, or of the evaluation before the first; return the correction in words after
        ten steps, else `None`."""
        if seconds := metrics.get("seconds/evaluate"):
            self._evaluations.append(seconds)
        if not metrics.get("seconds/step") or self.course.corrected is not None or "length/mean" not in metrics:
            return None
        self._steps.append(metrics)
        if len(self._steps) < MEASURED or step >= self.recipe.run.steps:
            return None
        usual = self._steps[1:]  # the first step of a session also allocates and compiles
        took, length = (fmean(row[name] for row in usual) for name in ("seconds/step", "length/mean"))
        forecast = (self.course.expected or {}).get("evaluation", 0.0)
        evaluation = fmean(self._evaluations) if self._evaluations else forecast
        seconds, counted = _rest(self.recipe, step=took, evaluation=evaluation, after=step, pending=False)
        corrected = {
            "after": step,
            "seconds": {"step": took, "evaluate": evaluation},
            "answer_tokens": length,
            "rest": seconds,
        }
        self.course = replace(self.course, corrected=corrected)
        write(self.folder, self.course, None)
        lengths = f"{length:,.3g} completion tokens per trajectory"
        return (
            f"forecast corrected by steps {step - MEASURED + 2} to {step}: {duration(took)} per step, {lengths}, "
            f"{duration(seconds)} for the other {counted}"
        )


def _setting(recipe: Recipe, root: Path) -> PlanningProblem | None:
    """The recipe's step on the run's devices; none where the planner cannot tell."""
    try:
        return foresee.setting_of(recipe, root, cluster_of_run(recipe))
    except RecipeError:
        return None


def _usual(recipe: Recipe, setting: PlanningProblem) -> int:
    """Tokens of a micro-batch if nothing goes wrong."""
    return token_budget(recipe, setting.ordered[0][1].kind)


# What it took --------------------------------------------------------------------------------------------------------


def measured(
    metrics: Path,
    *,
    after: int,
    memory: Mapping[str, float],
    price: float | None = None,
    since: int | None = None,
) -> dict[str, Any] | None:
    """Medians over the steps after one, from metrics.jsonl; none if there was no step. `price` is of a second, `since`
    the step after which the forecast was corrected."""
    written = [numbers_of(row) for row in read_rows(metrics)]
    rows = [row for row in written if row["step"] > after and row.get("seconds/step")]
    if not rows:
        return None
    names = [name for name in rows[-1] if name.startswith("seconds/") and name not in BETWEEN_STEPS]
    seconds = {name.removeprefix("seconds/"): median(row.get(name) or 0.0 for row in rows) for name in names}
    step = seconds.pop("step")
    return {
        "seconds": {"step": step, **seconds},
        "memory_gb": dict(memory),
        "idle": median(row.get("idle") or 0.0 for row in rows),
        "answers": median(row.get("trajectories/launched") or 0.0 for row in rows),
        "answer_tokens": median(row.get("length/mean") or 0.0 for row in rows),
        "cost_per_step": None if price is None else price * step,
        "steps": len(rows),
        "run": _whole_run(written, price),
        "rest": None
        if since is None
        else _whole_run([row for row in written if row["step"] > since], price)["seconds"],
    }


BETWEEN_STEPS = ("seconds/evaluate",)
"""Seconds that are not part of a step."""


def _whole_run(rows: Sequence[Mapping[str, float | None]], price: float | None) -> dict[str, Any]:
    """What all steps and evaluations took and cost, those before a resume included, and how far steps differed."""
    steps = sorted(seconds for row in rows if (seconds := row.get("seconds/step")))
    total = sum(steps) + sum(row.get(name) or 0.0 for row in rows for name in BETWEEN_STEPS)
    tenths = quantiles(steps, n=10, method="inclusive") if len(steps) > 1 else steps
    return {
        "seconds": total,
        "steps": len(steps),
        "step_interval": [tenths[0], tenths[-1]],
        "cost": None if price is None else price * total,
    }


def write(folder: Path, told: PlannedRun, took: Mapping[str, Any] | None) -> None:
    """plan.json, with what is known by now."""
    content = told.to_json() | ({} if took is None else {"measured": dict(took)})
    replace_file(folder / "plan.json", [to_json(content, indent=2), "\n"])


def table(
    expected: Mapping[str, Any] | None, took: Mapping[str, Any], corrected: Mapping[str, Any] | None = None
) -> list[str]:
    """A line per number that both sides have, or that one of them lacks."""
    said: Mapping[str, Any] = expected or {"seconds": {}, "memory_gb": {}}
    rows = [("", "predicted", "measured")]
    seconds = said["seconds"]
    for name, value in took["seconds"].items():
        if value >= SHOWN * took["seconds"]["step"] or name in seconds:
            rows.append((f"{name} s", _number(seconds.get(name)), _number(value)))
    for device, peak in took["memory_gb"].items():
        rows.append((f"GB {device}", _number(said["memory_gb"].get(device)), _number(peak)))
    if (cost := took["cost_per_step"]) is not None:
        told = said.get("cost_per_step")
        rows.append(("cost of a step", "-" if told is None else money(told), money(cost)))
    if (answers := took.get("answers")) != (likely := said.get("answers")):  # rounds of dynamic sampling
        rows.append(("answers a step", _number(likely), _number(answers)))
    rows.append(("tokens per trajectory", _number(said.get("answer_tokens")), _number(took["answer_tokens"])))
    if (whole := took.get("run")) is not None:
        rows += _of_the_run(said.get("run"), whole)
    if corrected is not None and took.get("rest"):
        rows.append((f"after step {corrected['after']}", duration(corrected["rest"]), duration(took["rest"])))
    widths = [max(len(row[index]) for row in rows) for index in range(3)]
    steps = f"median of {took['steps']} steps" if took["steps"] > 1 else "one step"
    return [
        "  ".join((row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]))).rstrip()
        + (f"  ({steps})" if index == 0 else "")
        for index, row in enumerate(rows)
    ]


def _of_the_run(said: Mapping[str, Any] | None, took: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of the whole run: the forecast, with its interval where it has one, and the measured seconds."""
    low, high = took["step_interval"]
    rows = [("most steps s", "-", f"{_number(low)} to {_number(high)}")]
    likely = "-" if said is None else duration(said["seconds"])
    if said is not None and said["interval"]:
        likely = between(said["seconds"], *said["interval"])
    rows.append(("whole run", likely, duration(took["seconds"])))
    if (cost := took["cost"]) is not None:
        likely = "-" if said is None or said["cost"] is None else money(said["cost"])
        if said is not None and said["cost_interval"]:
            likely += " ({} to {})".format(*map(money, said["cost_interval"]))
        rows.append(("cost of the run", likely, money(cost)))
    return rows


SHOWN = 0.01
"""Stages that take a smaller share of the step are not worth a line."""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def compare_to_forecast(
    folder: Path, told: PlannedRun, recipe: Recipe, root: Path, *, after: int, memory: Mapping[str, float]
) -> Sequence[str]:
    """Writes plan.json anew, with what was measured, and returns the table; nothing if there was no step."""
    hourly = recipe.placement.price_per_gpu_hour
    price = None if hourly is None else hourly * len(devices_of(recipe.placement)) / 3600
    since = None if told.corrected is None else told.corrected["after"]
    took = measured(folder / "metrics.jsonl", after=after, memory=memory, price=price, since=since)
    if took is None:
        return ()
    if learns_from_rows(recipe.algorithm.name):
        write(folder, told, took)
        return ()
    if told.expected is None:
        told = replace(told, expected=expectation(recipe, _setting(recipe, root), told.plan))
    if told.expected is not None:
        told = replace(told, expected={**told.expected, "run": _expected_run(recipe, told.expected)})
    write(folder, told, took)
    return table(told.expected, took, told.corrected)


def _expected_run(recipe: Recipe, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Forecast of the whole run, with an interval only where the recipe states lengths."""
    seconds = expected["seconds"]
    run = forecast_run(
        recipe,
        step=seconds["step"],
        evaluation=expected["evaluation"],
        spread=expected["spread"],
        error=expected["error"],
        devices=len(devices_of(recipe.placement)),
    )
    stated = recipe.batch.lengths is not None
    return run.to_json() | ({} if stated else {"interval": None, "cost_interval": None})
