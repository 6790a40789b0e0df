"""`stretto bench scaling RECIPE`: the recipe itself on 1, 2, 4, … devices, a run for each, and where time is lost.

What is reported is what those runs wrote down: metrics, plan, timeline. Beside it stands the planner's prediction, and
alone, marked as such, for sizes that are not at hand. Loads no torch itself. The same bench without a recipe
(`stretto.bench.spread`) compares steps of equal work in turn, which is the sharper measurement of a step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from stretto.bench import machine
from stretto.bench.scaling_sizes import (
    name_of,
    not_at_hand,
    part_of,
    refuse_cells,
    refuse_sizes,
    usual_sizes,
    written,
)
from stretto.checks.machine.load import busy_cores
from stretto.errors import RecipeError, StrettoError
from stretto.placement.cluster import Cluster, parse_cluster
from stretto.planner.forecast import setting_of
from stretto.planner.problem import PlanningProblem
from stretto.planner.search import search, variants_of
from stretto.planner.simulate import Forecast
from stretto.planner.whole_run import run_of
from stretto.recipe.schema import Recipe
from stretto.storage.json_lines import numbers_of, read_rows

Row = dict[str, Any]
Note = Callable[[str], None]
Train = Callable[[Path, Sequence[str], Path], None]
"""Trains a recipe with changes in a new run folder."""

LOST = ("work", "imbalance", "reduction", "publish", "evaluation")
"""Where the seconds go that more devices do not save; together all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRequest:
    """What is asked for."""

    recipe: Recipe
    """The recipe, with its changes."""
    path: Path
    """Its file."""
    root: Path
    """What its relative paths count from."""
    changes: tuple[str, ...] = ()
    """The changes, as on the command line."""
    cluster: str
    """The largest cluster that is run."""
    sizes: tuple[int, ...] = ()
    """Numbers of devices; none for 1, 2, 4, … and all."""
    ahead: tuple[int, ...] = ()
    """Numbers of devices that are only predicted."""

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """Numbers of devices that are asked for."""
        return self.sizes or usual_sizes(len(parse_cluster(self.cluster)))

    @property
    def not_at_hand(self) -> dict[int, str]:
        """Size -> why no run can have so many devices, of those that cannot."""
        parts = {size: part_of(parse_cluster(self.cluster), size) for size in self.all_sizes}
        return {size: why for size, part in parts.items() if (why := not_at_hand(part))}


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """What a run on some devices wrote down; seconds are of a usual step, after the first."""

    seconds: Mapping[str, float]
    """The step's seconds, whole and by stage, each the mean; evaluations on each step's account."""
    idle: float
    """Share of the devices' seconds without work."""
    tokens: float
    """Tokens that a step generates."""
    memory: Mapping[str, float]
    """Device -> GB at the peak."""
    accuracies: tuple[float, ...]
    """Held-out accuracies, in order."""
    total: float
    """Seconds of the whole run."""
    strategy: str
    """What was run."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """What the run expected of its plan."""


def scaling(
    wish: ScalingRequest, *, note: Note, train: Train | None = None, look: Callable[[], float] = busy_cores
) -> dict[str, Any]:
    """The document: a row for each size, those that were run first, why others have none, and `doubts`.

    `look` returns the cores that other programs keep busy. It is asked before and after each run, when this process
    has no work.
    """
    cluster, sizes = parse_cluster(wish.cluster), wish.all_sizes
    refuse_cells(wish.recipe)
    refuse_sizes(sizes, wish.ahead, cluster)
    short = wish.not_at_hand
    about = machine.describe(threads=machine.threads())
    taken: dict[int, SizeResult] = {}
    failed: dict[int, StrettoError] = {}
    busy: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="stretto-scaling-") as folder:
        for size in sizes:
            if size in short:
                note(f"{size} devices are only predicted: {short[size]}")
                continue
            run, name = Path(folder) / f"{size}", name_of(part_of(cluster, size))
            note(f"{name}: a run of {wish.recipe.run.steps} steps")
            changes = [*wish.changes, f"placement.cluster={written(part_of(cluster, size))}", f"run.folder={run}"]
            try:
                busy[size] = look()
                (train or train_apart)(wish.path, changes, run)
                busy[size] = max(busy[size], look())
                taken[size] = read_run(run)
            except StrettoError as error:  # what other sizes took is worth as much
                note(f"{name} failed: {said(error)}")
                failed[size] = error
    rows = [measured_row(wish, cluster, size, taken) for size in taken]
    rows += predicted_rows(wish, cluster, sorted({*short, *wish.ahead}), failed)
    if not rows:
        raise next(iter(failed.values()))
    lines = {name_of(part_of(cluster, size)): said(error) for size, error in sorted(failed.items())}
    doubts = list(doubts_of(rows, {name_of(part_of(cluster, size)): cores for size, cores in busy.items()}))
    for doubt in doubts:
        note(doubt)
    return {"bench": "scaling", "machine": about, "rows": rows, "failed": lines, "doubts": doubts}


BEYOND = 1.05
"""Efficiency above which the run on fewer devices was slowed by something else."""


def doubts_of(rows: Sequence[Row], busy: Mapping[str, float]) -> Iterator[str]:
    """Yield reasons to distrust the speed-ups of these rows; `busy` maps sizes to cores that other programs used."""
    kept = {name: told for name, cores in busy.items() if (told := machine.busy_words(cores))}
    for name, told in kept.items():
        yield f"{name}: {told}; do not trust its speed-up and efficiency"
    for row in rows:
        if row["measured"] and row["efficiency"] > BEYOND:
            why = f"{row['peer_name']} was slowed by something else, or has too little memory or cache for the work"
            yield f"{row['case']}: an efficiency of {row['efficiency']:.0%} is more than all devices have: {why}"


def said(error: StrettoError) -> str:
    """An error in a line."""
    return error.reasons if isinstance(error, RecipeError) else " ".join(str(error).split())


# Runs -----------------------------------------------------------------------------------------------------------------


def train_apart(recipe: Path, changes: Sequence[str], folder: Path) -> None:
    """A run in a process of its own; what it prints is quoted if it fails."""
    command = [sys.executable, "-m", "stretto", "train", str(recipe), *changes]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        said = " ".join(done.stderr.split()) or "it printed nothing"
        raise StrettoError(f"bench: the run in {folder.name} ended with exit code {done.returncode}: {said[-600:]}")


def read_run(folder: Path) -> SizeResult:
    """What a run wrote down."""
    rows = [numbers_of(row) for row in read_rows(folder / "metrics.jsonl")]
    stepped = [row for row in rows if row.get("seconds/step")]
    usual = stepped[1:] or stepped
    if not usual:
        raise StrettoError(f"bench: the run in {folder.name} took no step")
    plan: Mapping[str, Any] = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    names = {name for row in usual for name in row if name.startswith("seconds/")}
    seconds = {name.removeprefix("seconds/"): mean(row.get(name) or 0.0 for row in usual) for name in names}
    seconds["step"] = median(row["seconds/step"] or 0.0 for row in usual)
    evaluating = sum(row.get("seconds/evaluate") or 0.0 for row in rows)
    return SizeResult(
        seconds={**seconds, "evaluate": evaluating / len(stepped)},
        idle=median(row.get("idle") or 0.0 for row in usual),
        tokens=median(row.get("tokens/generated") or 0.0 for row in usual),
        memory=plan["measured"]["memory_gb"],
        accuracies=tuple(accuracy for row in rows if (accuracy := row.get("eval/accuracy")) is not None),
        total=sum(row["seconds/step"] or 0.0 for row in stepped) + evaluating,
        strategy=plan["strategy"],
        predicted=plan.get("predicted") or {},
    )


def mean(values: Any) -> float:
    """The mean of some numbers, of which there is one at least."""
    told = list(values)
    return sum(told) / len(told)


# Rows -----------------------------------------------------------------------------------------------------------------


def lost(one: SizeResult, many: SizeResult, *, times: float) -> dict[str, float]:
    """Seconds of a step, evaluations included, that `times` as many devices take beyond their share of one size's.

    `work` is what is left: pieces that take longer than their share, because they are smaller, compute a prompt twice,
    or wait for memory. It is below 0 where they take less.
    """

    def beyond(name: str) -> float:
        return many.seconds.get(name, 0.0) - one.seconds.get(name, 0.0) / times

    imbalance = many.idle * many.seconds["step"] - one.idle * one.seconds["step"] / times
    parts = {"imbalance": imbalance, "reduction": beyond("reduce"), "publish": beyond("publish") - beyond("reduce")}
    work = beyond("step") - sum(parts.values())
    return {"work": work, **parts, "evaluation": beyond("evaluate")}


def measured_row(wish: ScalingRequest, cluster: Cluster, size: int, taken: Mapping[int, SizeResult]) -> Row:
    """A size that was run, beside the smallest."""
    base = min(taken)
    mine, one, times = taken[size], taken[base], size / base
    speedup = one.seconds["step"] / mine.seconds["step"]
    expected = mine.predicted.get("seconds", {}).get("step")
    first = one.predicted.get("seconds", {}).get("step")
    return {
        "case": name_of(part_of(cluster, size)),
        "unit": "s/step",
        "stretto": mine.seconds["step"],
        "peer": one.seconds["step"],
        "peer_name": name_of(part_of(cluster, base)),
        "ratio": speedup,
        "devices": size,
        "measured": True,
        "strategy": mine.strategy,
        "efficiency": speedup / times,
        "accuracy": {"best": max(mine.accuracies), "final": mine.accuracies[-1]} if mine.accuracies else None,
        "utilization": 1 - mine.idle,
        "memory_gb": dict(mine.memory),
        "seconds": dict(mine.seconds),
        "tokens_per_second": mine.tokens / mine.seconds["step"],
        "run_seconds": mine.total,
        "cost": cost(wish.recipe, size, mine.total),
        "lost": lost(one, mine, times=times),
        "predicted": {"step": expected, "ratio": first / expected if first and expected else None},
    }


def predicted_rows(
    wish: ScalingRequest, cluster: Cluster, sizes: Sequence[int], failed: dict[int, StrettoError]
) -> Iterator[Row]:
    """Sizes that were not run, by the planner alone, beside what it says of the smallest that can be; why it says
    nothing of one is left in `failed`."""
    known: dict[int, tuple[Forecast, PlanningProblem]] = {}
    for size in sorted({*wish.all_sizes, *sizes}) if sizes else ():
        if size in sizes or not known:
            try:
                known[size] = forecast(wish, part_of(cluster, size))
            except StrettoError as error:
                failed.setdefault(size, error)
    for size in sizes:
        if size in known:
            yield predicted_row(wish, cluster, size, known, least=min(known))


def forecast(wish: ScalingRequest, part: Cluster) -> tuple[Forecast, PlanningProblem]:
    """The planner's answer for a part of the cluster."""
    section = wish.recipe.placement
    setting = setting_of(wish.recipe, wish.root, part)
    found = search(setting, variants_of(section, None if section.strategy == "auto" else section.strategy))
    if found.today is None:
        why = "; ".join(f"{name}: {reason}" for name, reason in found.rejected) or "no layout can be executed yet"
        raise RecipeError.of("placement", f"nothing runs on {len(part)} devices ({why})", "use more, or other devices")
    return found.today, setting


def predicted_row(
    wish: ScalingRequest,
    cluster: Cluster,
    size: int,
    known: Mapping[int, tuple[Forecast, PlanningProblem]],
    *,
    least: int,
) -> Row:
    """A size that was not run, beside what is said of the smallest."""
    (mine, setting), (one, _) = known[size], known[least]
    ratio, run = one.step / mine.step, run_of(mine, setting, wish.recipe, values=False)
    return {
        "case": name_of(part_of(cluster, size)),
        "unit": "s/step",
        "stretto": mine.step,
        "peer": one.step,
        "peer_name": f"{name_of(part_of(cluster, least))}, predicted",
        "ratio": ratio,
        "devices": size,
        "measured": False,
        "strategy": mine.choice.label,
        "efficiency": ratio * least / size,
        "accuracy": None,
        "utilization": 1 - mine.idle,
        "memory_gb": {},
        "seconds": {"step": mine.step, **mine.stages},
        "tokens_per_second": mine.tokens_per_second,
        "run_seconds": run.seconds,
        "cost": run.cost,
        "lost": {},
        "predicted": {"step": mine.step, "ratio": ratio, "interval": list(run.interval)},
    }


def cost(recipe: Recipe, devices: int, seconds: float) -> float | None:
    """At the recipe's price of a device per hour; none without one."""
    price = recipe.placement.price_per_gpu_hour
    return None if price is None else price * devices * seconds / 3600
