"""Is a run alive and sound, and what does a step spend its time on? Read from its folder, before anybody tunes it.

`health` looks for what makes tuning pointless: a run that hangs, answers without verdicts, steps that teach nothing.
`waits` says on what the wall time of a step went. What would make it faster is `planner.what_if`'s to say.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from stretto.algorithms.catalog import find_facts
from stretto.report.diagnosis import GUARDED
from stretto.report.read_run import RunRecord
from stretto.report.timeline import Span

RECENT = 20
"""Steps that are looked at, the newest."""
FAILED = 0.05
"""Share of answers without a verdict above which the run is not sound."""
DEAD = 0.9
"""Share of groups without contrast from which a step counts as one that taught nothing."""
SILENT, PATIENCE = 10.0, 60.0
"""A step that takes this many times the usual one, and at least so many seconds, may hang."""
BESIDE = ("evaluate", "checkpoint")
"""Stages that belong to no step."""
JUDGES = "judges"
"""The lane of reward functions, which run beside the cells."""
STACKS = re.compile(r"stacks-(\w+)-(\d+)\.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a reader should know of a run."""

    level: Literal["alarm", "notice", "fine"]
    """An alarm comes before all tuning."""
    text: str
    """What is the case."""
    fix: str = ""
    """What to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What a part of a step's wall time went to."""

    stage: str
    """A stage, or `nothing` where no cell worked."""
    what: str
    """The stage in words."""
    seconds: float
    """Seconds of the average step."""


def health(run: RunRecord, *, now: float | None = None) -> list[Finding]:
    """Everything that keeps a run from being sound, alarms first; a sound run has one line that says so."""
    found = [*_alive(run, time.time() if now is None else now), *_judged(run), *_taught(run), *_warned(run)]
    if not any(each.level == "alarm" for each in found) and run.steps:
        judged = any("reward/mean" in row for row in recent(run))  # none where rows are learned from
        text = "Steps end, answers are judged, and groups teach something." if judged else "Steps end."
        found.insert(0, Finding(level="fine", text=text))
    return sorted(found, key=lambda each: ("alarm", "fine", "notice").index(each.level))


def recent(run: RunRecord) -> list[dict[str, float]]:
    """The newest steps' metrics, without the evaluation before the first."""
    return [row for row in run.metrics if row["step"] > 0][-RECENT:]


def _alive(run: RunRecord, now: float) -> Iterator[Finding]:
    for path in sorted(run.folder.glob("stacks-*.txt")):
        if match := STACKS.fullmatch(path.name):
            text = f"{match[1]} passed its deadline in step {int(match[2])}"
            yield Finding(level="alarm", text=text, fix=f"{path.name} says where every thread stood")
    seconds = [row["seconds/step"] for row in recent(run) if row.get("seconds/step")]
    if not seconds:
        yield Finding(level="alarm", text="No step has ended yet.")
    if run.alive and seconds:
        silent = now - max((path.stat().st_mtime for path in run.written), default=now)
        if silent > max(PATIENCE, SILENT * median(seconds)):
            text = f"Nothing was written for {silent:.0f} s, and a step usually takes {median(seconds):.3g} s."
            yield Finding(level="alarm", text=text, fix="the deadlines will name what hangs; see `deadlines`")
    elif seconds and not run.finished:
        text = f"It stopped after step {run.steps} of {run.setting('run.steps')}."
        yield Finding(level="notice", text=text, fix=f"go on with: stretto resume {run.folder}")
    if run.lost:
        text = f"{run.lost}; the numbers of this page are of the other steps."
        yield Finding(level="notice", text=text, fix="restore the file from a copy, if there is one")
    if resumed := sum(event.get("kind") == "resumed" for event in run.events):
        yield Finding(level="notice", text=f"It was resumed {resumed} time{'s' if resumed > 1 else ''}.")


def _judged(run: RunRecord) -> Iterator[Finding]:
    rows = recent(run)
    launched = sum(row.get("trajectories/launched", 0.0) for row in rows)
    failed = sum(row.get("trajectories/failed", 0.0) for row in rows)
    if failed > FAILED * launched > 0:
        text = f"{failed:.0f} of {launched:.0f} answers of the last {len(rows)} steps have no verdict."
        yield Finding(level="alarm", text=text, fix="`failure` in samples/ says why")
    if skipped := sum(row.get("updates/skipped", 0.0) for row in rows):
        text = f"{skipped:.0f} updates were skipped because they were not finite."
        yield Finding(level="alarm", text=text, fix="a lower optimizer.lr, or model.dtype float32")


def _taught(run: RunRecord) -> Iterator[Finding]:
    facts = find_facts(str(run.setting("algorithm.name")))
    if facts is not None and not facts.learns_by_contrast:  # runs of before counted equal rewards of any algorithm
        return
    rows = [row for row in recent(run) if "groups/dead" in row and "groups/used" in row]
    judged = [(row["groups/dead"], max(row["groups/used"], row["groups/dead"])) for row in rows]
    empty = [dead >= DEAD * groups for dead, groups in judged if groups]
    if empty and fmean(empty) > 0.5:
        text = f"{sum(empty)} of the last {len(empty)} steps taught nothing: their groups have no contrast."
        yield Finding(level="alarm", text=text, fix="other prompts, more batch.samples, or a reward with more levels")


def _warned(run: RunRecord) -> Iterator[Finding]:
    """Warnings that the run gave: the newest of each rule and guard. One of the newest steps is an alarm."""
    newest: dict[str, tuple[int, str]] = {}
    for event in run.events:
        if event.get("kind") in ("diagnosis", "warning") and isinstance(event.get("text"), str):
            rule = event.get("rule") or GUARDED.get(str(event.get("guard")), f"guards.{event.get('guard')}")
            newest[str(rule)] = int(event["step"]), event["text"]
    for step, text in newest.values():
        level: Literal["alarm", "notice"] = "alarm" if step > run.steps - RECENT else "notice"
        yield Finding(level=level, text=f"Step {step}: {text}")


# What a step waits for ------------------------------------------------------------------------------------------------

WORDS = {
    "generate": "generating answers",
    "reward": "waiting for verdicts",
    "reference": "reference log-probabilities",
    "value": "the critic's values",
    "old": "log-probabilities before the updates",
    "train": "training",
    "fit": "training the critic",
    "publish": "update and hand-over of weights",
    "nothing": "between stages, no cell works",
}


def waits(run: RunRecord) -> list[Wait]:
    """Where the wall time of the newest steps went, the largest part first; parts add up to the step.

    Reward functions count only while no cell works, because they run beside. Where cells work on several stages at
    once, these share the time. Of the step's seconds in metrics.jsonl, what no span covers is `nothing`.
    """
    rows = {int(row["step"]): row["seconds/step"] for row in recent(run) if row.get("seconds/step")}
    by_step = defaultdict(list)
    for span in run.spans:
        if span.step in rows and span.stage not in BESIDE:
            by_step[span.step].append(span)
    total: dict[str, float] = defaultdict(float)
    for step, spans in by_step.items():
        found = shares(spans)
        for stage, seconds in found.items():
            total[stage] += seconds
        total["nothing"] += max(0.0, rows[step] - sum(found.values()))
    count = max(1, len(by_step))
    parts = [
        Wait(stage=stage, what=WORDS.get(stage, stage), seconds=seconds / count) for stage, seconds in total.items()
    ]
    return sorted((part for part in parts if part.seconds > 0), key=lambda part: -part.seconds)


def shares(spans: Sequence[Span]) -> dict[str, float]:
    """Stage -> seconds of the wall time of these spans, as `waits` divides them."""
    edges = sorted({edge for span in spans for edge in (span.start, span.start + span.seconds)})
    begins = sorted(spans, key=lambda span: span.start)
    found: dict[str, float] = defaultdict(float)
    active: list[Span] = []
    place = 0
    for low, high in pairwise(edges):
        while place < len(begins) and begins[place].start <= low:
            active.append(begins[place])
            place += 1
        active = [span for span in active if span.start + span.seconds > low]
        stages = {span.stage for span in active if span.cell != JUDGES} or {span.stage for span in active}
        for stage in stages or {"nothing"}:
            found[stage] += (high - low) / max(1, len(stages))
    return dict(found)


def idle_cells(run: RunRecord) -> dict[str, float]:
    """Cell -> the share of the newest steps in which it had no work, reward functions left out."""
    steps = {int(row["step"]): row["seconds/step"] for row in recent(run) if row.get("seconds/step")}
    busy: dict[str, float] = defaultdict(float)
    for span in run.spans:
        if span.step in steps and span.cell != JUDGES and span.stage not in BESIDE:
            busy[span.cell] += span.seconds
    whole = sum(steps.values())
    return {cell: max(0.0, 1.0 - seconds / whole) for cell, seconds in busy.items()} if whole else {}
