"""A search in words and as data: the table of plans, what binds the best one, by how much it wins, why others lost.

What a plan asks for that nothing can execute yet is priced like everything else, and said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from stretto.placement.devices import GB, WITHOUT_BFLOAT16
from stretto.placement.transport import TensorPath
from stretto.planner.candidate import Candidate
from stretto.planner.compare import slower_because, usual_of
from stretto.planner.problem import PlanningProblem
from stretto.planner.search import CLOSE, SearchResult
from stretto.planner.sensitivity import turning_point
from stretto.planner.simulate import Forecast
from stretto.planner.workload import StepWorkload

PARTS = ("weights", "gradients", "optimizer", "activations", "head", "gathered", "cache", "context")
"""Parts of a device's memory, as `RankMemory` names them."""

LEAST = 1e-6
"""Amounts below are not told apart."""


def document(found: SearchResult, setting: PlanningProblem) -> dict[str, Any]:
    """Plans and rejections as plain data, best first."""
    turn = turning_point(found.ready or found.best, setting)
    plans = [_plan(forecast, found, setting) for forecast in found.listed]
    if turn is not None:
        plans[0] |= {"why": f"{plans[0]['why']}; {turn}", "turns": turn.document()}
    return {
        "plans": plans,
        "rejected": [{"strategy": name, "why": why} for name, why in found.rejected],
        "assumed": list(setting.workload.assumed),
        "constants": setting.source,
    }


def _plan(forecast: Forecast, found: SearchResult, setting: PlanningProblem) -> dict[str, Any]:
    ending = {"update": forecast.ending.update, "publish": forecast.ending.publish, "switch": forecast.ending.switch}
    told = forecast.plan.to_json()
    return {
        "strategy": forecast.choice.label,
        "fits": True,
        "seconds": {"step": forecast.step, **forecast.stages, **ending},
        "rounds": forecast.rounds,
        "launched": forecast.launched,
        "updates": len(forecast.updates),
        "idle": forecast.idle,
        "memory_gb": memory_gb(forecast, setting),
        "tokens_per_second": forecast.tokens_per_second,
        "cost_per_step": cost(forecast, setting),
        "cells": told.pop("cells"),
        "plan": told,
        "why": why(forecast, found, setting),
        "paths": {"gradients": forecast.gradients.value, "weights": forecast.weights.value},
        "turns": None,
        "runs_today": forecast in found.ready,
        "waits_for": list(forecast.choice.waits_for(setting.workload)),
    }


def batch(work: StepWorkload) -> str:
    """What a step samples and how it learns from that, in a sentence."""
    told = f"a step: {work.prompts} prompts x {work.samples} samples"
    if work.acceptance is not None:
        many = "1 round" if len(work.rounds.sizes) == 1 else f"{len(work.rounds.sizes)} rounds"
        told += f" that have a contrast, of {work.launched} groups in {many}"
    if work.parts > 1:
        told += f", {work.parts} updates"
    lengths = work.lengths
    return f"{told}, prompts of {work.prompt} tokens, answers of {lengths.mean:.0f} on average, up to {lengths.cap}"


def memory_gb(forecast: Forecast, setting: PlanningProblem) -> dict[str, dict[str, float]]:
    """Device -> GB at the peak and part by part; devices that a plan leaves out hold nothing."""
    found = {name: {"peak": 0.0} for name in setting.cluster.devices}
    for room in forecast.room.sides:
        _, held = forecast.held(room)
        parts = {"peak": held.total / GB} | {part: getattr(held, part) / GB for part in PARTS}
        for name in forecast.names[room.side.first : room.side.first + room.side.size]:
            found[name] = dict(parts)
    return found


def cost(forecast: Forecast, setting: PlanningProblem) -> float | None:
    """Of a step, at the price of a device per hour for all devices of the cluster; none without a price."""
    price = setting.workload.price
    return None if price is None else price * len(setting.cluster) * forecast.step / 3600


def money(amount: float) -> str:
    """An amount with two digits that say something, also where it is less than a cent."""
    if 0 < amount < LEAST:
        return f"<{LEAST:f}"
    decimals = 2 if amount <= 0 else max(2, 1 - math.floor(math.log10(amount)))
    return f"{amount:.{decimals}f}"


def why(forecast: Forecast, found: SearchResult, setting: PlanningProblem) -> str:
    """What decides about the seconds of a plan, and how far it is ahead or behind."""
    first = found.listed[0]
    usual = usual_of(forecast, found.best if forecast in found.best else found.ready)
    more = usual and slower_because(forecast, usual, setting.workload)
    tail = f"; {more}" if more else ""
    if forecast is not first:
        behind = forecast.step / first.step - 1
        gap = f"{abs(behind):.0%} {'slower' if behind > 0 else 'faster'} than"
        said = "about as fast as" if abs(behind) < CLOSE else gap
        able = first in found.ready and forecast not in found.ready
        other = f"{first.choice.label} as it can be executed today" if able else first.choice.label
        told = f"{said} {other}; {binding(forecast, setting)}{tail}"
        waits = [] if forecast in found.ready else list(forecast.choice.waits_for(setting.workload))
        return told + (f"; it waits for {', '.join(waits)}" if waits else "")
    alike = found.ready if first in found.ready else found.best
    if len(alike) == 1:
        return f"{binding(forecast, setting)}{tail}"
    second = alike[1]
    ahead = second.step / first.step - 1
    margin = f"{ahead:.1%} ahead of {second.choice.label}"
    if ahead < CLOSE:
        margin = f"about as fast as {second.choice.label} ({abs(ahead):.1%} apart, less than the model is exact to)"
    return f"{margin}; {binding(forecast, setting)}{tail}"


def binding(forecast: Forecast, setting: PlanningProblem) -> str:
    """Which stage takes most of the step, and what it is bound by."""
    stage = max(forecast.stages, key=lambda name: forecast.stages[name])
    if forecast.ending.seconds > forecast.stages[stage]:
        return f"what follows the last gradient takes most of it ({_parts(forecast)})"
    share = forecast.stages[stage] / forecast.step
    if stage != "generate":
        return f"the {stage} stage takes {share:.0%} of it, bound by arithmetic"
    return f"generation takes {share:.0%} of it, bound by {_generation(forecast, setting)}"


def _generation(forecast: Forecast, setting: PlanningProblem) -> str:
    """The longest answer alone, too few answers at a time, or reading weights and caches."""
    work, choice = setting.workload, forecast.choice
    lanes = sum(cell.role == "generate" for cell in forecast.plan.cells)
    longest = max(map(max, work.drawn))
    if forecast.slots * lanes < work.answers:
        return f"room for caches: {forecast.slots} answers at a time on each of {lanes} lanes"
    if work.answers <= 8 * lanes:
        return f"its longest answer ({longest} tokens), with {work.answers} answers on {lanes} lanes"
    return f"reading weights and caches on {lanes} lanes of {choice.lane.width}, and by its longest answer ({longest})"


def _parts(forecast: Forecast) -> str:
    ending = forecast.ending
    return f"update {ending.update:.2g} s, publish {ending.publish:.2g} s, changes of phase {ending.switch:.2g} s"


def notes(found: SearchResult, setting: PlanningProblem) -> Iterator[str]:
    """What a reader should know besides."""
    work = setting.workload
    yield from work.assumed
    if setting.source is not None:
        yield setting.source
    else:
        names = ", ".join(dict.fromkeys(device.name for device, _ in setting.cluster.pools()))
        yield f"the speed of {names} is assumed, from data sheets and published measurements; nothing was measured here"
    old = sorted({device.name for device, _ in setting.cluster.pools()} & set(WITHOUT_BFLOAT16))
    if old and work.precision == "bfloat16":
        yield f"{', '.join(old)} has bfloat16 in software only, many times slower than forecast here; see model.dtype"
    if not found.best:
        return
    best = found.listed[0]
    devices, size = len(setting.cluster), f"{work.prompts} x {work.samples} answers"
    if best.workless:
        yield (
            f"the batch is too small to occupy the cluster: {best.workless} of {devices} devices have nothing to do "
            f"with {size}; raise batch.prompts, or use fewer devices"
        )
    if best.choice.devices < devices:
        yield (
            f"the best plan leaves {devices - best.choice.devices} of {devices} devices out: with {size} no layout "
            "over all of them is faster; raise batch.prompts, or use fewer devices"
        )
    if setting.mixed:
        yield (
            f"devices of several kinds: {setting.ordered[0][1].name} has most memory bandwidth for its arithmetic, so "
            "it generates first where devices are divided; training is bound by arithmetic"
        )
    cards = best.room.sides[0].device.kind.has_own_memory
    if cards and TensorPath.GLOO in (best.gradients, best.weights):
        yield (
            "between cells, tensors pass through host memory; placement.nccl=true passes them from card to card "
            "(not tried on GPUs yet)"
        )
    if cards and any(len(cell.devices) > 1 for cell in best.plan.cells):
        yield (
            "devices of one cell exchange their parts by NCCL: the code ran over gloo on CPUs, on several GPUs not yet"
        )
    if work.price is None and setting.cluster.hosts[0].device.kind.has_own_memory:
        yield "there is no price; placement.price_per_gpu_hour=2 adds what a step and the run cost"


def today(found: SearchResult, setting: PlanningProblem) -> str:
    """Whether the best plan can be executed, and what the faster one waits for that cannot."""
    fastest = found.best[0]
    waits = ", ".join(fastest.choice.waits_for(setting.workload))
    if found.today is None:
        return f"no plan can be executed yet; the best waits for {waits or 'being tried'}"
    if fastest == found.today:
        return f"{fastest.choice.label} is the fastest, and can be executed today"
    if fastest in found.ready:
        told = f"{found.today.choice.label} is as good as the fastest, {fastest.choice.label}"
        return f"{told}, whose devices hold a part of each model and talk in every layer"
    ahead = 1 - fastest.step / found.today.step
    told = f"{found.today.choice.label} is the best that can be executed today"
    if ahead <= 0 or not waits:
        return told
    if ahead < CLOSE:
        return f"{told}; no plan that waits for something would be faster by more than the model is exact to"
    other = f"{fastest.choice.label} would take {ahead:.0%} less ({fastest.step:.3g} s), and waits for {waits}"
    return f"{told}; {other}"


def layout(choice: Candidate, workload: StepWorkload) -> str:
    """How devices are divided, in a line."""
    told = [f"train {_cells(choice, workload, 'train')}", f"generate {_cells(choice, workload, 'generate')}"]
    frozen = [role for role in ("reference", "reward") if role in workload.roles - workload.reading]
    told += [f"{role} {_cells(choice, workload, role)}" for role in frozen]
    told.append(f"micro-batches of {choice.budget} tokens" + (", recomputed" if choice.recompute else ""))
    told += ["optimizer over all copies"] * choice.sharded + [
        "what does not work sleeps in host memory"
    ] * choice.sleeps
    return "; ".join(told)


def paths(forecast: Forecast) -> str:
    """How gradients and weights pass between devices, in a line."""
    return f"gradients: {forecast.gradients.sentence}; new weights: {forecast.weights.sentence}"


def _cells(choice: Candidate, workload: StepWorkload, role: str) -> str:
    split = choice.split(role, workload.reading)
    _, count = choice.places(workload.roles)[role]
    degrees = ", ".join(f"{key} {value}" for key, value in split.degrees.items() if value > 1)
    return f"{count // split.width} x {split.width}" + (f" ({degrees})" if degrees else "")
