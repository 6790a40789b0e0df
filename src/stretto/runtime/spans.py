"""Measures what every stage of a step takes, and turns the spans into the timeline and the step's seconds.

A watch, if there is one, ends a stage that takes too long; the clock tells it what was finished last.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from stretto.placement.devices import host_of
from stretto.report.timeline import Span, idle, to_events
from stretto.runtime.watch import StageWatch

ALL_DEVICES = ""
"""Stands for every device, where work has no cell of its own: checkpoints, evaluation, all of a run on one device."""

REWARD_WORKERS = "judges"
"""Where reward functions run beside several devices: processes that are no cell, whose work no device does."""


class Clock:
    """Seconds since the run's start, and the spans of the step under way."""

    def __init__(self, watch: StageWatch | None = None, devices: Mapping[str, str] | None = None) -> None:
        self.watch = watch or StageWatch(limits={}, folder=Path())
        self.devices = devices or {ALL_DEVICES: "here"}
        self.last = "nothing was finished before"
        self.zero = time.monotonic()
        self.began = 0.0
        self.spans: list[Span] = []
        self._told = 0

    def now(self) -> float:
        """Seconds since the run's start."""
        return time.monotonic() - self.zero

    def begin(self) -> None:
        """A step starts."""
        self.began, self.spans, self._told = self.now(), [], 0

    @contextmanager
    def stage(self, stage: str, cell: str, *, step: int, version: int) -> Iterator[dict[str, int]]:
        """Times a stage, watched; what the caller puts into the dict (groups, tokens, shared) goes into its span."""
        with self.watch.stage(stage, step, self.last), self.piece(stage, cell, step=step, version=version) as counts:
            yield counts

    @contextmanager
    def piece(self, stage: str, cell: str, *, step: int, version: int) -> Iterator[dict[str, int]]:
        """Times work of a cell that has deadlines of its own; several may be under way at once."""
        start, counts = self.now(), dict[str, int]()
        try:
            yield counts
            self.last = f"the last to finish was {stage} of step {step}, at {datetime.now():%H:%M:%S}"
        finally:  # what a death cuts off was work, too
            self.spans.append(
                Span(
                    stage=stage,
                    cell=cell,
                    start=start,
                    seconds=self.now() - start,
                    step=step,
                    version=version,
                    groups=counts.get("groups", 0),
                    tokens=counts.get("tokens", 0),
                    shared=counts.get("shared", 0),
                )
            )

    def events(self) -> list[dict[str, Any]]:
        """The spans of the step that were not told before, for a timeline, each on its cell's host."""
        hosts = {cell: host_of(device) for cell, device in self.devices.items()}
        new, self._told = self.spans[self._told :], len(self.spans)
        return [event for span in new for event in to_events([span], host=hosts.get(span.cell) or "localhost")]

    def metrics(self) -> dict[str, float]:
        """The step's seconds, whole and by stage for each cell that served it, and the share in which devices idle.

        Reward functions count where no cell serves their stage. No device is busy with them: they run beside all.
        """
        end = self.now()
        of_cells = [span for span in self.spans if span.cell != REWARD_WORKERS or REWARD_WORKERS in self.devices]
        served = {span.stage for span in of_cells}
        beside = [span for span in self.spans if span.cell == REWARD_WORKERS and span.stage not in served]
        stages: dict[str, float] = defaultdict(float)
        cells: dict[str, set[str]] = defaultdict(set)
        for span in (*of_cells, *beside):
            stages[f"seconds/{span.stage}"] += span.seconds
            cells[f"seconds/{span.stage}"].add(span.cell)
        on_devices = [replace(span, cell=self.devices.get(span.cell, ALL_DEVICES)) for span in of_cells]
        devices = sorted(set(self.devices.values()))
        busy = [replace(span, cell=device) for span in on_devices if span.cell == ALL_DEVICES for device in devices]
        idling = idle([*(s for s in on_devices if s.cell != ALL_DEVICES), *busy], devices, self.began, end)
        shares = {name: seconds / len(cells[name]) for name, seconds in stages.items()}
        return {"seconds/step": end - self.began, "idle": idling, **shares}
