"""`stretto report --explain`: what a step waits for, and the change that would help most, with what it would bring.

Liveness comes first: where `report.health` finds that a run hangs, fails or teaches nothing, no change of its speed is
recommended. Of a sound run the durations are read from its timeline and the lengths from its samples, and
`planner.what_if` tries changes that leave the result as it is. No PyTorch is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from stretto.algorithms.catalog import facts_of
from stretto.errors import StrettoError
from stretto.placement.build import plan_of
from stretto.placement.devices import kind_of
from stretto.placement.plan import Cell, Plan
from stretto.placement.strategies import STRATEGIES
from stretto.planner.what_if import (
    Change,
    Gain,
    MeasuredRun,
    PieceTimes,
    fitted_lanes,
    gains,
    step_seconds,
    verdict_seconds,
    with_budget,
)
from stretto.recipe.schema import Placement
from stretto.report.health import BESIDE, JUDGES, Finding, health, idle_cells, recent, waits
from stretto.report.read_run import RunRecord
from stretto.report.timeline import Span
from stretto.scheduler.records import role_of

STEPS = 8
"""Steps that are simulated, the newest."""
COLD = 2
"""First steps of a run, in which memory and processes are still made; they count only where there are few others."""
WORTH = 0.03
"""The share of a step that a change has to save to be worth a line."""
ENOUGH = 0.95
"""Of two settings of one key, the smaller one that brings this share of what the larger does."""
TRUSTED = 0.25
"""How far the simulation of a run as it is may be off what was measured."""
MORE_WORKERS = (2, 4, 8, 16, 32)
"""Times as many reward workers."""
WORKERS = 64
"""Most reward workers that are recommended."""


def explain(folder: Path, *, over: bool = False) -> dict[str, Any]:
    """What the page and the terminal show: `healthy`, `findings`, `waits` and `advice`, as plain data; `over` as in
    `RunRecord`."""
    run = RunRecord(folder, over=over)
    findings = health(run)
    healthy = not any(each.level == "alarm" for each in findings)
    advice: list[dict[str, Any]] = []
    if healthy:
        measured = measure(run)
        more, found = ([], []) if measured is None else _advised(run, measured)
        findings += more
        advice = [_line(gain) for gain in found]
    return {
        "healthy": healthy,
        "findings": [asdict(each) for each in findings],
        "waits": [asdict(each) for each in waits(run)],
        "advice": advice,
    }


def _advised(run: RunRecord, measured: MeasuredRun) -> tuple[list[Finding], list[Gain]]:
    """What is to be said besides, and the changes that are worth it, the best first."""
    simulated = step_seconds(measured)
    off = simulated / measured.seconds - 1
    findings = [
        Finding(level="notice", text=f"{cell} has no work in {share:.0%} of a step.")
        for cell, share in sorted(idle_cells(run).items(), key=lambda each: -each[1])
        if share > 0.25 and len(measured.plan.devices) > 1
    ]
    if abs(off) > TRUSTED:
        text = f"The simulator takes a step of this run for {simulated:.3g} s, {off:+.0%} off what was measured."
        return [*findings, Finding(level="notice", text=text, fix="so it is not asked what a change would bring")], []
    found = [gain for gain in _best_of_each(measured, list(changes(run, measured))) if gain.share >= WORTH]
    if not found:
        text = f"No change that the simulator knows would save {WORTH:.0%} of a step."
        return [*findings, Finding(level="fine", text=text)], []
    return findings, found


def _best_of_each(measured: MeasuredRun, asked: Sequence[Change]) -> list[Gain]:
    """The best setting of every key; of those that are about as good, the one that was named first."""
    order = {change.key: place for place, change in enumerate(asked)}
    by_key: dict[str, list[Gain]] = {}
    for gain in gains(measured, asked):
        by_key.setdefault(gain.change.key.partition("=")[0], []).append(gain)
    chosen = []
    for settings in by_key.values():
        if settings[0].share <= 0:  # each of them would cost something
            continue
        enough = ENOUGH * settings[0].share
        chosen.append(min((g for g in settings if g.share >= enough), key=lambda g: order[g.change.key]))
    return sorted(chosen, key=lambda gain: gain.seconds)


def _line(gain: Gain) -> dict[str, Any]:
    saved = f"{gain.before:.3g} s → {gain.seconds:.3g} s a step, {gain.share:.0%} less"
    return {"what": gain.change.what, "gain": saved, "change": gain.change.key, "share": gain.share}


# What was measured ----------------------------------------------------------------------------------------------------


def measure(run: RunRecord) -> MeasuredRun | None:
    """The newest steps of a run as `planner.what_if` wants them; none where it cannot tell (a plan by hand that is not
    there any more, no samples, several updates or a lag, whose steps are made of two)."""
    plan = _plan(run)
    rows = {int(row["step"]): row for row in recent(run) if row.get("seconds/step")}
    steps = [step for step in rows if step in run.sampled][-STEPS:]
    steps = warm if len(warm := [step for step in steps if step > COLD]) >= COLD else steps
    updates = run.setting("batch.updates", 1) * run.setting("batch.epochs", 1)
    if plan is None or not steps or plan.staleness or updates != 1:
        return None
    groups = {step: lengths_of(run.samples(step)) for step in steps}
    spans = [span for span in run.spans if span.step in groups and groups[span.step] and span.stage not in BESIDE]
    lanes = [lane for span in spans if span.stage == "generate" and (lane := _lane(span, groups[span.step]))]
    if not lanes:
        return None
    budgets = _budgets(run, plan)
    pieces = _piece_times(spans, budgets, [row for step, row in rows.items() if step in groups])
    shares = [rows[step]["decode/overhead"] for step in groups if "decode/overhead" in rows[step]]
    tick, tick_each = fitted_lanes(lanes, pieces, overhead=median(shares) if shares else None)
    workers = int(run.plan.get("reward_workers") or 1)
    judged = [span for span in spans if span.cell == JUDGES]
    answers = sum(len(sizes) for step in groups for _, sizes in groups[step])
    busy = sum(span.seconds for span in judged)
    return MeasuredRun(
        plan=plan,
        steps=tuple(tuple(each) for each in groups.values() if each),
        seconds=fmean(rows[step]["seconds/step"] for step in groups if groups[step]),
        tick=tick,
        tick_each=tick_each,
        pieces=pieces,
        verdict=verdict_seconds(busy, answers=answers, workers=workers),
        reward_workers=workers,
        update=_per_step(spans, "publish", len(groups)),
        budgets=budgets,
        barrier=facts_of(str(run.setting("algorithm.name"))).scope == "batch",
    )


def _piece_times(
    spans: Sequence[Span], budgets: Mapping[str, int], rows: Sequence[Mapping[str, float]]
) -> dict[str, PieceTimes]:
    """Stage -> seconds of its micro-batches. Of training, the trainer has measured what each costs beside tokens, and
    of rows that are only read that is about the same share."""
    overheads = [row["micro_batches/overhead"] for row in rows if "micro_batches/overhead" in row]
    found = {}
    for stage in sorted({span.stage for span in spans if span.tokens and role_of(span.stage) in budgets}):
        pieces = [(span.seconds, span.tokens) for span in spans if span.stage == stage and span.tokens]
        budget = budgets[role_of(stage)]
        if overheads:
            found[stage] = PieceTimes.shared_out(pieces, overhead=median(overheads), budget=budget)
        else:
            found[stage] = PieceTimes.fitted(pieces, budget=budget)
    return found


def lengths_of(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, tuple[int, ...]]]:
    """(tokens of the prompt, tokens of each answer) of every group of a step."""
    found: dict[tuple[Any, Any], list[tuple[int, int]]] = {}
    for row in rows:
        flags = [bool(flag) for talk in row.get("conversations") or () for flag in talk.get("trained") or ()]
        prompt = flags.index(True) if any(flags) else len(flags)
        found.setdefault((row.get("prompt"), row.get("visit")), []).append((prompt, sum(flags)))
    return [(max(p for p, _ in group), tuple(size for _, size in group)) for group in found.values()]


def _plan(run: RunRecord) -> Plan | None:
    try:
        told = dict(run.plan)
        cells = tuple(
            Cell(**{**cell, "devices": tuple(cell["devices"]), "sleeps": tuple(cell["sleeps"])})
            for cell in told["cells"]
        )
        kept = {name: told[name] for name in ("strategy", "flow", "staleness", "optimizer", "tail")}
        return Plan(**kept, cells=cells, priority={name: tuple(each) for name, each in told["priority"].items()})
    except (KeyError, TypeError, AttributeError):
        return None


def _lane(span: Span, groups: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[float, int, int, int] | None:
    """A lane as `fitted_lanes` wants it; of one among several, the longest answer of all stands for its own."""
    if not span.tokens:
        return None
    longest = max(max(sizes, default=0) for _, sizes in groups)
    share = span.groups / len(groups) if span.groups else 1.0
    context = round(share * sum(prompt for prompt, _ in groups))
    return span.seconds, min(longest, span.tokens), span.tokens, context


def _per_step(spans: Sequence[Span], stage: str, steps: int) -> float:
    """Seconds of a stage that all its cells do together."""
    longest: dict[int, float] = {}
    for span in spans:
        if span.stage == stage:
            longest[span.step] = max(longest.get(span.step, 0.0), span.seconds)
    return median(longest.values()) if longest else 0.0


def _budgets(run: RunRecord, plan: Plan) -> dict[str, int]:
    told = run.setting("batch.token_budget", "auto")
    return {
        cell.role: kind_of(cell.devices[0]).micro_batch if told == "auto" else int(told)
        for cell in plan.cells
        if cell.role != "generate"
    }


# What could be changed ------------------------------------------------------------------------------------------------


def changes(run: RunRecord, measured: MeasuredRun) -> Iterator[Change]:
    """Settings that leave the result as it is; of each key the mildest first."""
    if measured.verdict:
        for times in MORE_WORKERS:
            workers = min(WORKERS, times * measured.reward_workers)
            yield Change(
                key=f"run.reward_workers={workers}",
                what=f"More workers for reward functions ({workers} instead of {measured.reward_workers}), "
                "if these wait for something rather than compute.",
                apply=lambda before, workers=workers: replace(before, reward_workers=workers),  # type: ignore[misc]
            )
    usual = {role: kind_of(measured.plan.devices[0]).micro_batch for role in measured.budgets}
    if any(measured.budgets[role] < usual[role] for role in usual):
        tokens = max(usual.values())
        now = max(measured.budgets.values())
        yield Change(
            key="batch.token_budget=auto",
            what=f"Larger micro-batches (up to {tokens} tokens instead of {now}).",
            apply=lambda before: with_budget(before, tokens),
        )
    if len(measured.plan.devices) > 1 and run.setting("placement.cells") is None:
        yield from _strategies(run, measured)


def _strategies(run: RunRecord, measured: MeasuredRun) -> Iterator[Change]:
    """Every other strategy on the same devices."""
    roles = {cell.role for cell in measured.plan.cells}
    # Those that read the trainer's own tensors, as recipe.describe.reading_roles says it of a recipe.
    reading = {"generate"} | ({"value"} & roles)
    if run.setting("model.adapter") and not run.setting("roles.teacher"):
        reading |= {"reference"}
    for name in STRATEGIES:
        try:
            plan = plan_of(
                Placement(strategy=name),
                roles=roles,
                devices=measured.plan.devices,
                reading=reading,
                engine=str(run.setting("engine.kind", "native")),
            )
        except StrettoError:
            continue
        if name != measured.plan.strategy:
            yield Change(
                key=f"placement.strategy={name}",
                what=f"The strategy {name} instead of {measured.plan.strategy}.",
                apply=lambda before, plan=plan: replace(before, plan=plan),  # type: ignore[misc]
            )
