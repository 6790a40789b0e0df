"""How long whoever calls a worker waits, and what is said when that is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Protocol

from stretto.errors import DeadlineError
from stretto.recipe.schema import ApartEngineSection, Recipe

CLOSING, CLOSING_LATE = 60.0, 3.0
"""Seconds for workers to end, and then for their launcher: usually, and where a deadline has passed already."""

SAYS_SO = 1.0
"""Seconds for a launcher to say itself why it does not get its devices, which it knows best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDeadlines:
    """Seconds that a call may take, by what it does; the recipe's deadlines."""

    start: float
    """Loading the model."""
    generate: float
    """A round of decoding."""
    train: float
    """A piece of scoring or training, or the update."""
    publish: float
    """Handing weights round."""


def call_deadlines(recipe: Recipe) -> CallDeadlines:
    """The recipe's. In any call after the start an engine of another process may die and have to load again, for which
    it has the time of a start besides."""
    given = recipe.deadlines
    again = given.start if isinstance(recipe.engine, ApartEngineSection) else 0.0
    return CallDeadlines(
        start=given.start, generate=given.generate + again, train=given.train + again, publish=given.publish + again
    )


KEYS = {
    **dict.fromkeys(("start", "meet", "listen", "unreachable", "stop_listening"), "start"),
    "generate": "generate",
    **dict.fromkeys(("fetch", "engine_weights", "peak_memory"), "publish"),
}
"""What is called -> the recipe's deadline that it has; that of training, if it is none of these."""


class WorkerNames(Protocol):
    """The group whose workers are called."""

    last: float
    """When any of them answered last."""
    silent: set[str]
    """Devices that have not answered in time."""

    def called(self, device: str) -> str:
        """A device in words."""
        ...

    async def witness(self, stage: str) -> str:
        """Writes down where every process stands; returns what a message says of it."""
        ...


class Deadline:
    """Ends a wait with a message that says for whom, for what, since when."""

    def __init__(self, stage: str, device: str, seconds: float, worker_group: WorkerNames) -> None:
        self.stage, self.device, self.seconds, self.worker_group = stage, device, seconds, worker_group

    async def __aenter__(self) -> None:
        self.limit = asyncio.timeout(self.seconds)
        await self.limit.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self.limit.__aexit__(*error)
        except TimeoutError as late:
            if not self.limit.expired():
                raise
            self.worker_group.silent.add(self.device)
            raise await self.missed() from late

    async def missed(self) -> DeadlineError:
        """What to say when it has passed."""
        quiet, since = time.monotonic() - self.worker_group.last, datetime.now() - timedelta(seconds=self.seconds)
        told = await self.worker_group.witness(self.stage)
        return DeadlineError(
            f"{self.worker_group.called(self.device)}: {self.stage} has not answered for {self.seconds:g} s, since "
            f"{since:%H:%M:%S}; the last answer of any worker came {quiet:.0f} s ago\n{told}"
            f"    fix: look what that process does, or raise deadlines.{KEYS.get(self.stage, 'train')}"
        )


async def opened(opening: Awaitable[None], seconds: float, worker_group: WorkerNames) -> None:
    """Waits until a launcher has its devices."""
    since, begun, limit = datetime.now(), time.monotonic(), asyncio.timeout(seconds + SAYS_SO)
    try:
        async with limit:
            await opening
    except DeadlineError as late:
        if time.monotonic() - begun < seconds - SAYS_SO:
            raise  # it was clear at once that nobody would come, and nothing hangs
        raise DeadlineError(f"{late}\n{await worker_group.witness('start')}".rstrip()) from late
    except TimeoutError as late:
        if not limit.expired():
            raise
        told = await worker_group.witness("start")
        raise DeadlineError(
            f"start: the devices were not there after {seconds:.0f} s, since {since:%H:%M:%S}\n{told}"
            "    fix: look what it waits for, or raise deadlines.start"
        ) from late


async def at_most(seconds: float, ending: Awaitable[object]) -> None:
    """Waits for something to end, or leaves it behind."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await ending
