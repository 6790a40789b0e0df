"""The rows of `stretto bench scaling RECIPE` for people: a table, bars for a terminal, a picture of the speed-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stretto.bench.page import number
from stretto.bench.page import table as markdown_table
from stretto.planner.explain import money
from stretto.planner.whole_run import duration
from stretto.report.chart import Curve, chart

Document = Mapping[str, Any]

WIDE = 40
"""Characters of the longest bar."""

PREDICTED = "(predicted)"
"""What is written beside a size that was not run."""


def cells_of(document: Document) -> list[list[str]]:
    """The head and a row of text for each size."""
    rows: Sequence[Document] = document["rows"]
    priced = any(row["cost"] is not None for row in rows)
    head = ["devices", "strategy", "s a step", "predicted", "speed-up", "predicted", "efficiency", "busy", "accuracy"]
    head += ["GB a device", "run", *["cost"] * priced]
    return [head, *(_row(row, priced=priced) for row in rows)]


def _row(row: Document, *, priced: bool) -> list[str]:
    measured, accuracy, said = row["measured"], row["accuracy"], row["predicted"]
    told = [row["case"] if measured else f"{row['case']} {PREDICTED}", row["strategy"]]
    told += [number(row["stretto"]) if measured else "", _or_dash(said["step"])]
    told += [f"{row['ratio']:.2f}" if measured else "", _or_dash(said["ratio"])]
    told += [f"{row['efficiency']:.0%}", f"{row['utilization']:.0%}"]
    told.append(f"{accuracy['best']:.2f} best, {accuracy['final']:.2f} final" if accuracy else "")
    told.append(f"{max(row['memory_gb'].values()):.2f}" if row["memory_gb"] else "")
    told.append(duration(row["run_seconds"]))
    return [*told, *["" if row["cost"] is None else money(row["cost"])] * priced]


def _or_dash(value: float | None) -> str:
    return "-" if value is None else number(value)


def table(document: Document) -> list[str]:
    """Lines of equal columns."""
    rows = cells_of(document)
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def losses(document: Document) -> list[str]:
    """What each size takes beyond its share of the smallest one's step, and for what."""
    rows: Sequence[Document] = document["rows"]
    return [
        f"{row['case']} loses {sum(row['lost'].values()):.2g} s a step: "
        + ", ".join(f"{name} {seconds:.2g}" for name, seconds in row["lost"].items())
        for row in rows
        if row["lost"] and row["case"] != row["peer_name"]
    ]


def failures(document: Document) -> list[str]:
    """Sizes without a row, and why; then why rows are not to be trusted."""
    return [*(f"{case} failed: {why}" for case, why in document["failed"].items()), *document.get("doubts", ())]


def bars(document: Document) -> Iterator[str]:
    """A bar of the speed-up for each size; predicted ones are hatched, and a mark stands where all devices' work is."""
    rows: Sequence[Document] = document["rows"]
    ideal = {row["case"]: row["ratio"] / row["efficiency"] for row in rows}
    most = max((*ideal.values(), *(row["ratio"] for row in rows)))
    width = max(len(row["case"]) for row in rows)
    for row in rows:
        length, end = (max(1, round(WIDE * value / most)) for value in (row["ratio"], ideal[row["case"]]))
        bar = ("#" if row["measured"] else "/") * length
        yield f"{row['case']:<{width}} |{bar.ljust(end - 1)}{'|' * (length < end)} {row['ratio']:.2f}"
    hatched = ", / predicted" if any(not row["measured"] for row in rows) else ""
    yield f"{'':<{width}}  speed-up: # measured{hatched}, | as many times as there are devices"


def picture(document: Document) -> str:
    """Speed-up over devices as SVG: what was measured, what is predicted, and the ideal."""
    rows: Sequence[Document] = sorted(document["rows"], key=lambda row: row["devices"])
    first = rows[0]["devices"]
    told = [(float(row["devices"]), row["ratio"]) for row in rows if row["measured"]]
    said = [
        (float(row["devices"]), float(row["predicted"]["ratio"]))
        for row in rows
        if row["predicted"]["ratio"] is not None
    ]
    ideal = [(float(row["devices"]), row["devices"] / first) for row in rows]
    curves: dict[str, list[Curve]] = {"ideal": [ideal], "measured": [told], "predicted": [said]}
    drawn = {name: lines for name, lines in curves.items() if lines[0]}
    top = max(y for lines in drawn.values() for line in lines for _, y in line)
    return chart("Speed-up of a step", "devices", "times as fast", drawn, top=top)


def section(document: Document, *, date: str, command: str) -> str:
    """The results as Markdown, with date, machine and command."""
    machine, (head, *rows) = document["machine"], cells_of(document)
    where = (
        f"{date}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"load {machine['load']} before the run."
    )
    lost = [f"- {line}" for line in (*losses(document), *failures(document))]
    return "\n".join([where, "", f"    {command}", "", *markdown_table(head, rows), *[""] * bool(lost), *lost])
