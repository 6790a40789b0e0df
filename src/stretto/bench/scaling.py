"""`stretto bench scaling RECIPE`: the recipe itself on 1, 2, 4, … devices, a run for each, and where time is lost.

What is reported is what those runs wrote down: metrics, plan, timeline. Beside it stands the planner's prediction, and
alone, marked as such, for sizes that are not at hand. Loads no torch itself. The same bench without a recipe
(`stretto.bench.spread`) compares steps of equal work in turn, which is the sharper measurement of a step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from stretto.bench import machine
from stretto.checks.machine.facts import look
from stretto.checks.machine.network import cluster_named
from stretto.errors import RecipeError, StrettoError
from stretto.placement.cluster import Cluster, parse_cluster
from stretto.placement.devices import Device, DeviceKind
from stretto.planner.forecast import setting_of
from stretto.planner.search import search, variants_of
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


def scaling(wish: ScalingRequest, *, note: Note, train: Train | None = None) -> dict[str, Any]:
    """The document: a row for each size, those that were run first."""
    cluster = parse_cluster(wish.cluster)
    sizes = wish.sizes or usual_sizes(len(cluster))
    refuse_sizes(sizes, wish.ahead, cluster)
    short = {size: why for size in sizes if (why := not_at_hand(part_of(cluster, size)))}
    about = machine.describe(threads=machine.threads())
    taken: dict[int, SizeResult] = {}
    with tempfile.TemporaryDirectory(prefix="stretto-scaling-") as folder:
        for size in sizes:
            if size in short:
                note(f"{size} devices are only predicted: {short[size]}")
                continue
            run = Path(folder) / f"{size}"
            note(f"{name_of(part_of(cluster, size))}: a run of {wish.recipe.run.steps} steps")
            changes = [*wish.changes, f"placement.cluster={written(part_of(cluster, size))}", f"run.folder={run}"]
            (train or train_apart)(wish.path, changes, run)
            taken[size] = read_run(run)
    rows = [measured_row(wish, cluster, size, taken) for size in taken]
    for size in sorted({*short, *wish.ahead}):
        rows.append(predicted_row(wish, cluster, size, least=min((*sizes, *wish.ahead))))
    return {"bench": "scaling", "machine": about, "rows": rows}


# Sizes ----------------------------------------------------------------------------------------------------------------


def usual_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, … and all."""
    return tuple(dict.fromkeys([*(2**power for power in range(most.bit_length()) if 2**power <= most), most]))


def refuse_sizes(sizes: Sequence[int], ahead: Sequence[int], cluster: Cluster) -> None:
    """Raises for sizes that the cluster does not have, or cannot be made of it."""
    if wrong := [size for size in sizes if not 1 <= size <= len(cluster)]:
        fix = "use sizes of the cluster, and --ahead for those that are only to be predicted"
        raise RecipeError.of("--size", f"the cluster has {len(cluster)} devices, not {wrong[0]}", fix)
    if any(size > len(cluster) for size in ahead) and len(cluster.pools()) > 1:
        reason = "it has several kinds of devices, so it is not clear which there would be more of"
        raise RecipeError.of("--ahead", reason, "use sizes that the cluster has, or a cluster of one kind")


def part_of(cluster: Cluster, size: int) -> Cluster:
    """The first devices of a cluster; beyond it, more of its hosts."""
    hosts, left = [], size
    for host in cluster.hosts:
        count = min(left, host.count)
        if count:
            each = host.each[:count]
            hosts.append(replace(host, count=count, device=each[0], unequal=each if len(set(each)) > 1 else ()))
        left -= count
    last = cluster.hosts[-1]
    while left > 0 and last.device.kind.has_own_memory:
        count = min(left, last.device.per_host)
        hosts.append(replace(last, name=f"host{len(hosts)}", count=count, unequal=()))
        left -= count
    if left > 0:  # threads of a CPU are all of one machine
        hosts[-1] = replace(hosts[-1], count=hosts[-1].count + left)
    if len(hosts) == 1:
        hosts = [replace(hosts[0], name="localhost")]
    elif hosts[0].name == "localhost":
        hosts[0] = replace(hosts[0], name="host0")
    return replace(cluster, hosts=tuple(hosts))


def written(cluster: Cluster) -> str:
    """A cluster as a recipe writes it. One CPU device has one thread, as each of several."""
    alone = len(cluster) == 1
    parts = []
    for host in cluster.hosts:
        several = "1x" if len(cluster.hosts) > 1 else ""
        kinds: dict[Device, int] = {}
        for device in host.each:
            kinds[device] = kinds.get(device, 0) + 1
        for device, count in kinds.items():
            bare = device.kind is DeviceKind.CPU and not device.threads
            parts.append(f"{several}{count}x{device.name}{'1' * (alone and bare)}")
    return "+".join(parts)


def name_of(cluster: Cluster) -> str:
    """A cluster in words."""
    return str(cluster)


def not_at_hand(cluster: Cluster) -> str | None:
    """Why a run could not have these devices; none if it can."""
    parse_cluster(written(cluster))  # devices that only a cluster file knows have no name here
    if len(cluster.hosts) > 1:
        return None if cluster_named(os.environ) else f"{len(cluster.hosts)} hosts need a Ray cluster (RAY_ADDRESS)"
    here, kind = look(), cluster.hosts[0].device.kind
    there = here.cores if kind is DeviceKind.CPU else len(here.gpus)
    count = sum(device.threads or 1 for device in cluster.devices.values()) if kind is DeviceKind.CPU else len(cluster)
    word = "cores" if kind is DeviceKind.CPU else "GPUs"
    return None if count <= there else f"they need {count} {word}, and there are {there}"


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
        "utilisation": 1 - mine.idle,
        "memory_gb": dict(mine.memory),
        "seconds": dict(mine.seconds),
        "tokens_per_second": mine.tokens / mine.seconds["step"],
        "run_seconds": mine.total,
        "cost": cost(wish.recipe, size, mine.total),
        "lost": lost(one, mine, times=times),
        "predicted": {"step": expected, "ratio": first / expected if first and expected else None},
    }


def predicted_row(wish: ScalingRequest, cluster: Cluster, size: int, *, least: int) -> Row:
    """A size that was not run, by the planner alone, beside what it says of the smallest."""
    recipe = wish.recipe

    def forecast(count: int) -> tuple[Any, Any]:
        setting = setting_of(recipe, wish.root, part_of(cluster, count))
        named = recipe.placement.strategy
        found = search(setting, variants_of(recipe.placement, None if named == "auto" else named))
        if found.today is None:
            why = "; ".join(f"{name}: {reason}" for name, reason in found.rejected) or "no layout can be executed yet"
            raise RecipeError.of("--ahead", f"nothing runs on {count} devices ({why})", "leave this size out")
        return found.today, setting

    (mine, setting), (one, _) = forecast(size), forecast(least)
    ratio, run = one.step / mine.step, run_of(mine, setting, recipe)
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
        "utilisation": 1 - mine.idle,
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
