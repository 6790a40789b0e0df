"""RUN/report.html while a run goes on and when it ends: written by the run itself, seldom enough to cost it nothing.

The page is `report.html`'s, what it says of a step `explain_run`'s. It is a picture of the run and no part of it: what
goes wrong here is told once, and the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from stretto.report.html import ReportPage
from stretto.runtime.explain_run import explain
from stretto.storage.lock import still_held

SHARE = 0.02
"""The share of a run's time that its page may take."""
SELDOM = 5.0
"""Seconds between two pages, at least."""


class LivePage:
    """The page of a run under way; a context manager around its training, at whose end the page has all of it."""

    def __init__(self, folder: Path, note: Callable[[str], None], *, wanted: bool = True) -> None:
        """Where a page is not `wanted`, nothing is written."""
        self.folder, self.note, self.wanted = folder, note, wanted
        self.page = ReportPage([folder])
        self.due = time.monotonic() + SELDOM

    def stepped(self) -> None:
        """A step has ended: a new page, if the last one is old enough."""
        if self.wanted and time.monotonic() >= self.due:
            started = time.monotonic()
            self._write(over=False)
            now = time.monotonic()
            self.due = now + max(SELDOM, (now - started) / SHARE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """The run is over, done or not. One that never took a step has no page."""
        if self.wanted and (self.folder / "metrics.jsonl").is_file():
            self._write(over=True)

    def _write(self, *, over: bool) -> None:
        try:
            still_held(self.folder)
            self.page.write(self.folder / "report.html", explained=[explain(self.folder, over=over)], over=over)
        except Exception as error:  # whatever it is, a picture of a run is no reason to end it
            self.note(f"report.html could not be written ({error}); the run goes on without it")
            self.wanted = False


def write_report(
    folders: Sequence[Path], path: Path, *, steps: Sequence[int] = (), page: ReportPage | None = None
) -> list[dict[str, Any]]:
    """Writes the page of some runs, and returns what it says of each."""
    told = [explain(folder) for folder in folders]
    (page or ReportPage(folders, steps=steps)).write(path, explained=told)
    return told
