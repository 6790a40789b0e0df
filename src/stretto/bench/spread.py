"""The benches of several cells: rows for `stretto bench strategies` and `stretto bench scaling`.

A ratio is the median over steps that were taken in turn, each beside the step of the same round that it is compared
with. Everything is measured in one run; what is left out is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from textwrap import shorten
from typing import Any

from stretto.bench.cases import BenchCase
from stretto.bench.compare import BenchSettings, CaseJobs, Row, figure
from stretto.bench.jobs import JobResult
from stretto.errors import StrettoError
from stretto.placement.strategies import STRATEGIES

CELLS = 2
"""Workers of one thread each."""

PRECISE = 1e-5
"""What gradients of one model in fp32 may differ by, relative to their largest number."""

WORDS = 200
"""Letters of a reason that stand in a table."""

OVERHEAD = 0.90
"""Share of what the machine itself allows two processes that weak scaling should reach."""


def strategies_rows(setting: BenchSettings, case: BenchCase) -> list[Row]:
    """Each strategy beside flatten, and how far their gradients are apart. Not of four models, which in fp32 are more
    than two of these workers can hold; tests compare theirs, on small ones."""
    names = plan_names(case)
    desk = CaseJobs(setting, case)
    taken = desk.measure("plans in turn", plans=names)
    single = {name: desk.measure("plans alone", plans=(name,)) for name in names}
    rows = [_strategy(case, name, taken, single) | desk.common(taken, taken) for name in names]
    return rows if case.critic else [*rows, agreement(replace(setting, steps=1), case, names)]


def plan_names(case: BenchCase) -> tuple[str, ...]:
    """The plans of a case. Shares of the devices differ only where several models are asked, and for four models in
    more than one way."""
    names: list[str] = []
    for name, each in STRATEGIES.items():
        if each.presets and case.critic:
            names += [f"{name} {shares}" for shares in each.presets]
        elif not each.presets or case.reference:
            names.append(name)
    return tuple(names)


def _strategy(case: BenchCase, name: str, taken: JobResult, single: Mapping[str, JobResult]) -> Row:
    """One strategy's row."""
    plans: Mapping[str, Any] = taken.facts["plans"]
    mine, flat = plans[name], plans["flatten"]
    row = figure(
        replace(case, name=f"{case.name} {name}"),
        "s/step",
        median(mine["seconds"]),
        median(flat["seconds"]),
        peer_name="flatten",
        ratio=paired(flat["seconds"], mine["seconds"]),
    )
    row |= {
        "strategy": name,
        "idle": median(mine["idle"]),
        "seconds": mine["seconds"],
        "stages": stages(mine),
        "started": single[name].facts["started"],
        "memory_gb": {device: gained / 2**30 for device, gained in single[name].facts["memory"].items()},
        **_expected(single["flatten"], single[name]),
    }
    if STRATEGIES[name.partition(" ")[0]].tail["move"]:
        shares = [tail / seconds for tail, seconds in zip(flat["tail"], flat["seconds"], strict=True)]
        row |= {"gain": 1 - 1 / row["ratio"], "bound": median(shares)}
    return row


def _expected(flat: JobResult, mine: JobResult) -> Row:
    """What the planner says of a plan; nothing where it says nothing."""
    beside, expected = flat.facts["expected"], mine.facts["expected"]
    if beside is None or expected is None:
        return {}
    return {"expected": expected, "expected_ratio": beside["seconds"]["step"] / expected["seconds"]["step"]}


def scaling_rows(setting: BenchSettings, case: BenchCase) -> list[Row]:
    """Two cells beside one, and beside what the machine allows two processes that exchange nothing."""
    desk = CaseJobs(replace(setting, steps=CELLS * (1 + setting.steps) - 1), case)
    taken = desk.measure("cells in turn", plans=("one", "other", "flatten", "elastic"))
    plans: Mapping[str, Any] = taken.facts["plans"]
    seconds = {name: plans[name]["seconds"] for name in plans}
    bound = paired(seconds["one"], seconds["apart"])
    rows = []
    for name in ("flatten", "elastic"):
        weak, strong = f"{name} weak", f"{name} strong"
        reached = figure(
            replace(case, name=f"{case.name} {weak}"),
            "efficiency",
            paired(seconds["one"], seconds[weak]),
            bound,
            peer_name="two processes that exchange nothing",
            ratio=paired(seconds["apart"], seconds[weak]),
        )
        faster = figure(
            replace(case, name=f"{case.name} {strong}"),
            "s/step",
            median(seconds[strong]),
            median(seconds["one"]),
            peer_name="one cell",
            ratio=paired(seconds["one"], seconds[strong]),
        )
        rows += [
            reached | {"seconds": seconds, "goal": OVERHEAD, **_cells(plans[weak])},
            faster | _cells(plans[strong]),
        ]
    return [
        *(row | desk.common(taken, taken) for row in rows),
        agreement(replace(setting, steps=2), case, ("one", "flatten", "elastic")),
    ]


def _cells(plan: Mapping[str, Any]) -> Row:
    """What the cells of a plan did."""
    return {"idle": median(plan["idle"]), "stages": stages(plan)}


def stages(plan: Mapping[str, Any]) -> dict[str, float]:
    """The median seconds of each stage on a cell that serves it."""
    return {stage: median(each[stage] for each in plan["stages"]) for stage in plan["stages"][0]}


def paired(others: Sequence[float], mine: Sequence[float]) -> float:
    """How many times longer the others took, the median over rounds."""
    return median(other / own for other, own in zip(others, mine, strict=True))


def agreement(setting: BenchSettings, case: BenchCase, plans: Sequence[str]) -> Row:
    """Whether plans come to the same in fp32: the gradient of the same answers, answers drawn anew, and rewards."""
    desk = CaseJobs(setting, replace(case, name=f"{case.name} fp32", dtype="float32"))
    unit, peer = "relative difference of gradients", "what fp32 may differ by"
    try:
        found = desk.measure("plans agree", plans=tuple(plans))
    except StrettoError as error:  # fp32 is more than some machines have; the timings stand without it
        setting.note(str(error))
        none = {"stretto": None, "peer": None, "ratio": None, "failed": {"fp32": shorten(str(error), WORDS)}}
        beside = desk.common(JobResult(), JobResult())
        return {"case": desk.case.name, "unit": unit, "peer_name": peer, **none, **beside}
    largest = max(found.facts["differences"].values())
    row = figure(
        desk.case,
        unit,
        largest,
        PRECISE,
        peer_name=peer,
        ratio=PRECISE / max(largest, 1e-12),
    )
    return row | {**found.facts, **desk.common(found, found)}
