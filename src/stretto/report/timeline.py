"""What worked when: spans of work on cells, as Chrome-trace events and as a share of idle time.

A span is one piece of work of one stage on one cell, measured by a run or made up by a simulator; both use this format.
Seconds count from the run's start. Writing the events to a file is the journal's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work on one cell.

    Example: training step 3's 8 groups took the cell "train" from second 61.0 to second 64.5 of the run:
    Span(stage="train", cell="train", start=61.0, seconds=3.5, step=3, groups=8, tokens=1800).
    """

    stage: str
    """generate, reward, reference, value, train, fit or publish; also evaluate and checkpoint."""
    cell: str
    """The cell that worked."""
    start: float
    """Seconds since the run's start."""
    seconds: float
    """How long it took."""
    step: int
    """The step it belongs to."""
    groups: int = 0
    """Groups it worked on."""
    tokens: int = 0
    """Tokens it computed."""
    shared: int = 0
    """Prefix tokens it did not have to compute again."""
    version: int = 0
    """Version of the weights it used."""
    simulated: bool = False
    """True if a simulator made it up."""


def to_events(spans: Iterable[Span], host: str) -> list[dict[str, Any]]:
    """Complete events of the Chrome trace format, which Perfetto opens; times in microseconds."""
    return [
        {
            "name": span.stage,
            "ph": "X",
            "pid": host,
            "tid": span.cell,
            "ts": round(span.start * 1e6),
            "dur": round(span.seconds * 1e6),
            "args": {
                "step": span.step,
                "groups": span.groups,
                "tokens": span.tokens,
                "shared": span.shared,
                "version": span.version,
                "simulated": span.simulated,
            },
        }
        for span in spans
    ]


def idle(spans: Iterable[Span], cells: Sequence[str], start: float, end: float) -> float:
    """Share of the cells' seconds between `start` and `end` without work; spans that overlap on a cell count once."""
    busy = 0.0
    reached = dict.fromkeys(cells, start)
    for span in sorted(spans, key=lambda span: span.start):
        if span.cell in reached:
            begin = max(span.start, reached[span.cell])
            stop = min(span.start + span.seconds, end)
            busy += max(0.0, stop - begin)
            reached[span.cell] = max(reached[span.cell], stop)
    total = len(reached) * (end - start)
    return max(0.0, 1.0 - busy / total) if total > 0 else 0.0
