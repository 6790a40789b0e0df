"""Output of `stretto plan`: the table of plans, and details and timeline of the best plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stretto.placement.devices import GB
from stretto.planner import explain
from stretto.planner.problem import PlanningProblem
from stretto.planner.search import SearchResult
from stretto.planner.sensitivity import turning_point
from stretto.planner.simulate import Forecast
from stretto.planner.whole_run import RunForecast
from stretto.report.timeline import Span
from stretto.scheduler.records import UPDATE

if TYPE_CHECKING:  # Imported on first use: timelines and JSON documents do not need rich.
    from rich.text import Text

DRAWN = 8
"""Max number of devices in the drawn timeline."""
COLUMNS = 72
"""Characters per device in the drawn timeline."""
LETTERS = {
    "generate": "g", "reward": "w", "reference": "r", "value": "v", "old": "o", "train": "T", "fit": "F",
    "publish": "p",
}  # fmt: skip
"""Stage -> its letter in the drawn timeline."""


def spans(forecast: Forecast) -> list[Span]:
    """Convert a forecast to timeline spans, in the format of a run."""
    found = [
        Span(
            stage=stretch.stage,
            cell=stretch.cell,
            start=stretch.start,
            seconds=stretch.stop - stretch.start,
            groups=stretch.groups,
            tokens=stretch.tokens,
            step=1,
            simulated=True,
        )
        for stretch in forecast.stretches
    ]
    trained = [cell.name for cell in forecast.plan.cells if cell.role in UPDATE]
    return found + [
        Span(stage="publish", cell=cell, start=start, seconds=stop - start, step=1, simulated=True)
        for start, stop in forecast.updates
        for cell in trained
    ]


def page(
    found: SearchResult,
    setting: PlanningProblem,
    named: str,
    measured: Mapping[str, float] | None = None,
    *,
    run: RunForecast,
) -> Text:
    """Format the search result as text.

    `named` is the recipe's strategy, marked in the table; `measured` maps plans to measured seconds; `run` is the
    forecast of the whole run with the best plan.
    """
    from rich.text import Text

    work, best = setting.workload, found.listed[0]
    text = Text()
    policy = work.shapes["train"]
    how = f"LoRA of rank {work.adapter}" if work.adapter else "all weights"
    text.append(
        f"{policy.name}, {policy.params / 1e9:.3g} billion parameters, training {how}, on {setting.cluster}\n"
        f"{explain.batch(work)}\n"
    )
    text.append(f"{explain.today(found, setting)}\n\n", style="green" if found.ready else "yellow")
    for index, line in enumerate(_table(found, setting, named, measured or {})):
        text.append(f"{line}\n", style="bold" if index == 0 else "green" if index == 1 else "")
    text.append("\n")
    for forecast in found.listed:
        text.append(f"{forecast.choice.label}", style="bold").append(f": {explain.why(forecast, found, setting)}\n")
    if (turn := turning_point(found.ready or found.best, setting)) is not None:
        text.append(f"{turn}\n")
    for names, why in _rejected(found):
        told = f" {'is' if len(names) == 1 else 'are'} no choice: {why}\n"
        text.append(", ".join(names), style="bold").append(told)
    text.append("\nthe best plan", style="bold").append("\n" if found.ready else ", which cannot be executed yet\n")
    text.append(f"  {explain.layout(best.choice, work)}\n")
    if best.choice.devices > 1:
        text.append(f"  {explain.paths(best)}\n")
    for line in _memory(best):
        text.append(f"  {line}\n")
    text.append("\n")
    for line in _lanes(best):
        text.append(f"  {line}\n")
    text.append("\nthe whole run", style="bold").append(f": {run}\n")
    for note in explain.notes(found, setting):
        text.append("\nnote: ", style="yellow").append(note)
    told = f"\n{found.weighed} layouts weighed, {found.simulated} simulated; every number is a forecast\n"
    return text.append(told, style="dim")


def _table(found: SearchResult, setting: PlanningProblem, named: str, measured: Mapping[str, float]) -> list[str]:
    """Format the table of plans with aligned columns."""
    stages = ["generate", *setting.workload.stages]
    head = [
        "strategy",
        "runs today",
        *["measured s"] * bool(measured),
        "step s",
        *stages,
        "rest",
        "idle",
        "tokens/s",
        "GB",
    ]
    priced = setting.workload.price is not None
    rows = [head + ["cost/step"] * priced]
    for forecast in found.listed:
        mark = " *" if forecast.choice.label == named else ""
        peaks = dict.fromkeys(f"{forecast.held(room)[1].total / GB:.1f}" for room in forecast.room.sides)
        row = [f"{forecast.choice.label}{mark}", "yes" if forecast in found.ready else "no"]
        row += [_seconds(took) if (took := measured.get(forecast.choice.label)) else "-"] if measured else []
        row.append(_seconds(forecast.step))
        row += [_seconds(forecast.stages.get(stage, 0.0)) for stage in stages]
        row += [_seconds(forecast.ending.seconds), f"{forecast.idle:.0%}", f"{forecast.tokens_per_second:,.0f}"]
        row.append("/".join(peaks))
        cost = explain.cost(forecast, setting)
        row += [] if cost is None else [explain.money(cost)]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return lines + (["* the recipe's own"] if any("*" in row[0] for row in rows) else [])


def _rejected(found: SearchResult) -> Iterator[tuple[list[str], str]]:
    """Yield (strategies, reason) of rejected strategies, grouped by reason."""
    names: dict[str, list[str]] = {}
    for name, why in found.rejected:
        names.setdefault(why, []).append(name)
    yield from ((named, why) for why, named in names.items())


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:.0f}"


def _memory(forecast: Forecast) -> list[str]:
    """Return one line per kind of device: peak memory, its parts, and the memory available."""
    lines = []
    for room in forecast.room.sides:
        phase, held = forecast.held(room)
        parts = {part: getattr(held, part) / GB for part in explain.PARTS}
        told = ", ".join(f"{part} {size:.1f}" for part, size in parts.items() if size >= 0.05)
        many = f"{room.side.size} devices" if room.side.size > 1 else "1 device"
        lines.append(
            f"{many} ({', '.join(room.side.roles)}): {held.total / GB:.1f} of {room.usable / GB:.1f} GB in the phase "
            f"{phase}: {told}"
        )
    return lines


def _lanes(forecast: Forecast) -> Iterator[str]:
    """Draw the stages of some devices over time, one letter per stage, then the legend."""
    end = forecast.step
    on = {cell.name: cell.devices for cell in forecast.plan.cells}
    rows: dict[str, list[str]] = {}
    used = forecast.plan.devices
    shown = used if len(used) <= DRAWN else [used[i * (len(used) - 1) // (DRAWN - 1)] for i in range(DRAWN)]
    for device in shown:
        rows[device] = ["."] * COLUMNS
    for stretch in forecast.stretches:
        for device in on[stretch.cell]:
            if device in rows:
                first, last = (min(COLUMNS - 1, int(x / end * COLUMNS)) for x in (stretch.start, stretch.stop))
                rows[device][first : last + 1] = LETTERS[stretch.stage] * (last + 1 - first)
    width = max(map(len, rows))
    for device, row in rows.items():
        for start, stop in forecast.updates:
            first, last = (min(COLUMNS, int(x / end * COLUMNS) + 1) for x in (start, stop))
            first = min(first, COLUMNS - 1)
            row[first:last] = "p" * (last - first)
        yield f"{device:<{width}} |{''.join(row)}|"
    seen = {stretch.stage for stretch in forecast.stretches} | {"publish"}
    legend = ", ".join(f"{letter} {stage}" for stage, letter in LETTERS.items() if stage in seen)
    yield f"{'':<{width}}  0 to {end:.3g} s: {legend} (and update), . idle"
