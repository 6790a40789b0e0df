"""Ends a run while there is still time to save: before a step that would not be over in time, or within one.

When the time is over is said by the recipe or the cluster (`stretto.recipe.time_limit`); what a step and a checkpoint
take is measured as the run goes. Until a checkpoint was written, a minute is kept for it, or a tenth of a short time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from types import TracebackType
from typing import Self

from stretto.report.console import Progress
from stretto.runtime.interrupt import StopRequest

FIRST, SHARE = 60.0, 0.1
"""Seconds kept for the first checkpoint, and the share of all the time that this may be."""

TIMES, SPARE, PART = 2.0, 5.0, 0.02
"""How often the longest checkpoint so far fits into what is kept, with so many seconds beside it, which are at most
this part of all the time."""

SEEN = 5
"""Of so many steps the longest is expected next: one with an evaluation is among them more often than not."""


class TimeLimit:
    """Watches the time of a session; without a limit it does nothing."""

    def __init__(self, request: StopRequest, screen: Progress) -> None:
        """`request` knows when it is over."""
        self.end, self.who = request.end or (float("inf"), "")
        self.seconds = self.end - time.monotonic()
        self.request, self.screen = request, screen
        self.steps, self.saves = deque[float](maxlen=SEEN), deque[float](maxlen=SEEN)
        self.timer: asyncio.TimerHandle | None = None

    @property
    def kept(self) -> float:
        """Seconds to end and save in."""
        if not self.saves:
            return min(FIRST, SHARE * self.seconds)
        return TIMES * max(self.saves) + min(SPARE, PART * self.seconds)

    def stepped(self, seconds: float) -> None:
        """A step is over; the run is asked to end if another would come too late."""
        self.steps.append(seconds)
        self._look(max(self.steps), f"another step of {max(self.steps):.0f} s and its checkpoint")

    def saved(self, seconds: float) -> None:
        """A checkpoint is on the disk, which took so long."""
        self.saves.append(seconds)
        self._set()

    def _look(self, needed: float, what: str) -> None:
        left = self.end - time.monotonic()
        if left <= needed + self.kept and not self.request.why:
            self.screen.note(f"{self.who}: {max(0.0, left):.0f} s are left, too little for {what}; stopping")
            self.request.time_is_over(self.who)

    def _set(self) -> None:
        """The timer, for the moment at which a checkpoint must begin."""
        if self.timer is not None:
            self.timer.cancel()
        if self.seconds != float("inf"):
            loop = asyncio.get_running_loop()
            wait = max(0.0, self.end - self.kept - time.monotonic())
            self.timer = loop.call_later(wait, self._look, 0.0, "more than a checkpoint")

    def __enter__(self) -> Self:
        self._set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.timer is not None:
            self.timer.cancel()
