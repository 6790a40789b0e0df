"""Measures what every stage of a step takes, and turns the spans into the timeline and the step's seconds.

A watch, if there is one, ends a stage that takes too long; the clock tells it what was finished last.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from stretto.report.timeline import Span, idle
from stretto.run.watch import Watch


class Clock:
    """Seconds since the run's start, and the spans of the step under way."""

    def __init__(self, watch: Watch | None = None) -> None:
        self.watch = watch or Watch(limits={}, folder=Path())
        self.last = "nothing was finished before"
        self.zero = time.monotonic()
        self.began = 0.0
        self.spans: list[Span] = []

    def now(self) -> float:
        """Seconds since the run's start."""
        return time.monotonic() - self.zero

    def begin(self) -> None:
        """A step starts."""
        self.began, self.spans = self.now(), []

    @contextmanager
    def stage(self, stage: str, cell: str, *, step: int, version: int) -> Iterator[dict[str, int]]:
        """Times a stage; what the caller puts into the dict (groups, tokens, shared) goes into its span."""
        start, counts = self.now(), dict[str, int]()
        with self.watch.stage(stage, step, self.last):
            yield counts
        seconds = self.now() - start
        self.last = f"the last to finish was {stage} of step {step}, at {datetime.now():%H:%M:%S}"
        self.spans.append(
            Span(
                stage=stage,
                cell=cell,
                start=start,
                seconds=seconds,
                step=step,
                version=version,
                groups=counts.get("groups", 0),
                tokens=counts.get("tokens", 0),
                shared=counts.get("shared", 0),
            )
        )

    def metrics(self) -> dict[str, float]:
        """The step's seconds, whole and by stage, and the share of them in which no stage ran."""
        end = self.now()
        stages: dict[str, float] = defaultdict(float)
        for span in self.spans:
            stages[f"seconds/{span.stage}"] += span.seconds
        # Stages of one process share a lane, whatever cell they are shown on.
        lane = [Span(stage=s.stage, cell="lane", start=s.start, seconds=s.seconds, step=s.step) for s in self.spans]
        return {"seconds/step": end - self.began, "idle": idle(lane, ["lane"], self.began, end), **stages}
