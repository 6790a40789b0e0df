"""What a start waits for, told as it goes: a line a phase, with the seconds since it began."""

from __future__ import annotations

import time
from collections.abc import Callable


class StartupPhases:
    """The phases of one start. On one device there is little to wait for, and nothing is said."""

    def __init__(self, tell: Callable[[str], object], *, devices: int) -> None:
        self.tell, self.devices, self.begun = tell, devices, time.monotonic()

    def __call__(self, what: str) -> None:
        """A phase begins."""
        if self.devices > 1:
            self.tell(f"start, {time.monotonic() - self.begun:.0f} s: {what}")
