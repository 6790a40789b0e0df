"""How this process is: whether its event loop gets to run, and how much memory it holds."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

BEAT = 0.25
"""Seconds between two looks at the clock."""


class HostWatch:
    """Looks at the clock all the time; what comes between two looks was held up by something that blocks.

    `turned` is when it looked last, for a thread that watches (`watch.LoopWatch`).
    """

    def __init__(self) -> None:
        self.worst, self.turned = 0.0, time.monotonic()
        self.beating: asyncio.Task[None] | None = None

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(BEAT)
            now = self.turned = time.monotonic()
            self.worst, last = max(self.worst, now - last - BEAT), now

    def metrics(self) -> dict[str, float]:
        """The longest that the event loop was held up since this was asked last, and the memory held now."""
        worst, self.worst = self.worst, 0.0
        return {"seconds/loop_lag": worst, **resident()}

    def __enter__(self) -> Self:
        self.turned = time.monotonic()
        self.beating = asyncio.ensure_future(self._beat())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.beating is not None:
            self.beating.cancel()


def resident() -> dict[str, float]:
    """Memory of this process in GB, where the system tells it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return {}
    return {"memory/host_gb": pages * os.sysconf("SC_PAGE_SIZE") / 2**30}
