"""Results as Markdown, and where they stand in a page: between two comments, so that a new run replaces an old one.

Numbers are written here only by a bench that has just measured them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]

DIVERGENCES = {"divergences_per_1000_tokens": "alone", "draft_divergences_per_1000_tokens": "without drafts"}
"""What a row calls the rates at which other tokens are sampled, and how."""


def section(document: Document, *, date: str, command: str) -> str:
    """A bench's results with date, machine and command."""
    machine, rows = document["machine"], document["rows"]
    devices = sorted({row["device"] for row in rows})
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "transformers", "trl") if machine[name])
    where = (
        f"{date}, {machine['cpu']}, {machine['threads']} threads of {machine['cores']} cores, "
        f"{machine['memory_gb']} GB, load {machine['load']} before the run, device {' and '.join(devices)}; {versions}."
    )
    parts = [where, "", f"    {command}", "", *_figures(rows)]
    for beside in (_beside(rows), _cells(rows), _expected(rows), _agreement(rows), _publishes(rows)):
        parts += ["", *beside] if beside else []
    if replays := [row for row in rows if "replay" in row]:
        parts += ["", *_replays(replays)]
    if any(row.get("failed") for row in rows):
        parts += ["", *(f"{row['case']}, left out: {why}" for row in rows for why in row.get("failed", {}).values())]
    return "\n".join(parts)


def put(page: Path, name: str, text: str) -> None:
    """Writes a section between its comments, or with them at the end of the page."""
    begin, end = f"<!-- results of {name} -->", f"<!-- end of {name} -->"
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    before, found, rest = old.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        before, after = f"{old.rstrip()}\n\n" if old.strip() else "", "\n"
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [_line(head), _line(["---"] * len(head)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _figures(rows: Sequence[Document]) -> list[str]:
    """The comparison itself."""
    return table(
        ("case", "unit", "stretto", "peer", "times better", "peer's name"),
        [
            (
                row["case"],
                row["unit"],
                number(row["stretto"]),
                number(row["peer"]),
                times(row["ratio"]),
                row["peer_name"],
            )
            for row in rows
        ],
    )


def _beside(rows: Sequence[Document]) -> list[str]:
    """Work and speed, for the rows that have a time; a row of memory would repeat its case."""
    timed = [row for row in rows if "flops" in row and row["unit"] != "GB at the peak"]
    return (
        []
        if not timed
        else table(
            (
                "case",
                "prompt",
                "tokens generated",
                "tokens trained",
                "TFLOP unshared",
                "TFLOP shared",
                "GFLOP/s stretto, peer",
                "matmul GFLOP/s",
                "share stretto, peer",
                "divergences per 1,000: alone, without drafts",
            ),
            [
                (
                    row["case"],
                    str(row["prompt_tokens"]),
                    str(row["tokens_generated"]["stretto"]),
                    str(row.get("tokens_trained", {}).get("stretto", "")),
                    f"{row['flops']['unshared'] / 1e12:.2f}",
                    f"{row['flops']['shared'] / 1e12:.2f}",
                    _pair(row["gflops_per_second"], "{:.0f}"),
                    f"{row['matmul_gflops_per_second']:.0f}",
                    _pair(row["share_of_matmul_rate"], "{:.0%}"),
                    ", ".join(number(row[rate]) for rate in DIVERGENCES if rate in row),
                )
                for row in timed
            ],
        )
    )


def _cells(rows: Sequence[Document]) -> list[str]:
    """What several cells did, for the rows that are about them."""
    head = ("case", "idle", "each stage: s on a cell that serves it", "start, s", "GB per cell", "gain", "its bound")
    several = [row for row in rows if "idle" in row]
    return (
        []
        if not several
        else table(
            head,
            [
                (
                    row["case"],
                    f"{row['idle']:.1%}",
                    ", ".join(
                        f"{name.removeprefix('seconds/')} {number(s)}"
                        for name, s in row.get("stages", {}).items()
                        if name != "seconds/step"
                    ),
                    number(row["started"]) if "started" in row else "",
                    ", ".join(f"{gained:.2f}" for gained in row.get("memory_gb", {}).values()),
                    f"{row['gain']:.1%}" if "gain" in row else "",
                    f"{row['bound']:.1%}" if "bound" in row else "",
                )
                for row in several
            ],
        )
    )


def _expected(rows: Sequence[Document]) -> list[str]:
    """What the planner said of a plan, beside what was measured, for the rows of which it said something."""
    planned = [row for row in rows if row.get("expected")]
    head = ("case", "s/step: planned, measured", "times flatten's", "idle", "GB of the fullest cell")
    return [] if not planned else table(head, [_planned(row) for row in planned])


def _planned(row: Document) -> list[str]:
    expected = row["expected"]
    pairs = (
        (expected["seconds"]["step"], row["stretto"], "{:.2f}"),
        (1 / row["expected_ratio"], 1 / row["ratio"], "{:.2f}"),
        (expected["idle"], row["idle"], "{:.0%}"),
        (max(expected["memory_gb"].values()), max(row["memory_gb"].values()), "{:.2f}"),
    )
    return [row["case"], *(f"{form.format(planned)}, {form.format(measured)}" for planned, measured, form in pairs)]


def _agreement(rows: Sequence[Document]) -> list[str]:
    """How far plans are apart, for the rows that compare them."""
    compared = [row for row in rows if "differences" in row]
    return (
        []
        if not compared
        else table(
            ("case", "gradients compared", "relative difference", "answers drawn otherwise", "mean rewards"),
            [
                (
                    row["case"],
                    pair,
                    f"{apart:.1e}",
                    f"{row['other_answers'][pair.rpartition(', ')[2]]} of {row['answers']}",
                    "; ".join(", ".join(number(r) for r in row["rewards"][name]) for name in pair.split(", ")),
                )
                for row in compared
                for pair, apart in row["differences"].items()
            ],
        )
    )


def _publishes(rows: Sequence[Document]) -> list[str]:
    """What publishes are made of, for the rows that are about them."""
    head = ("case", "publish, s", "hand-over, s", "proof, s", "MB handed over", "of the prediction")
    publishes = [row for row in rows if "bytes" in row]
    return (
        []
        if not publishes
        else table(
            head,
            [
                (
                    row["case"],
                    *(number(row["seconds"][part]) for part in ("publish", "hand-over", "proof")),
                    number(row["bytes"] / 1e6),
                    row["constants"],
                )
                for row in publishes
            ],
        )
    )


def _replays(rows: Sequence[Document]) -> list[str]:
    """What both sides made of the same tokens."""
    names = ("reward", "loss", "grad_norm")
    return table(
        ("case, same tokens on both sides", *(f"{name}: stretto, peer" for name in names)),
        [(row["case"], *(_pair(row["replay"][name], "{:.6g}") for name in names)) for row in rows],
    )


def _pair(sides: Mapping[str, float], form: str) -> str:
    return ", ".join(form.format(sides[side]) for side in ("stretto", "peer") if side in sides)


def times(ratio: float | None) -> str:
    """How many times better, or that nothing was compared."""
    return "-" if ratio is None else f"{ratio:.2f}"


def number(value: float | None) -> str:
    """Three digits that count; a dash where there is no number."""
    if value is None:
        return "-"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
