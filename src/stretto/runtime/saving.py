"""Writes checkpoints while the run goes on.

Weights move at the end of a step and nowhere else. So what a checkpoint holds need not be copied: it is written from
the tensors themselves while the next answers are generated and trained on, and only an update waits for those who
write (`WorkerGroup.apply`). What this process holds is small and noted at once. There is one checkpoint on its way at
a time; that it exists is said and recorded when it is on the disk under its name.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stretto.errors import CheckpointError, DeadlineError
from stretto.report.timeline import Span, to_events
from stretto.runtime import guards
from stretto.runtime.runtime import Runtime
from stretto.runtime.spans import Clock
from stretto.storage.checkpoint import Checkpoints, PartSnapshot
from stretto.storage.lock import still_held
from stretto.storage.run_folder import Journal
from stretto.threads import beside, give_way
from stretto.types import Stateful

LANE = "checkpoints"
"""What checkpoints are under in the timeline, as they are written beside the cells."""

CLOSING, HURRY = 60.0, 1.0
"""Seconds for one that is under way when a run fails: usually, and where it is to end at once."""


class CheckpointWriter:
    """The checkpoints of a run."""

    def __init__(
        self,
        parts: Runtime,
        *,
        journal: Journal,
        checkpoints: Checkpoints,
        stateful: Sequence[Stateful],
        durable: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        """`stateful` are the parts of a checkpoint in this process; `durable` is told what a checkpoint took."""
        self.parts, self.journal, self.checkpoints = parts, journal, checkpoints
        self.stateful, self.durable = tuple(stateful), durable
        self.writing: asyncio.Task[None] | None = None

    async def begin(self, clock: Clock, *, step: int, metrics: Mapping[str, float]) -> None:
        """Begins the checkpoint of the run as it is after `step`, once the one before is done; raises if that failed.

        One that is there already is not written again.
        """
        await self.settled()
        if await beside(self.checkpoints.has, step, metrics):
            return
        guards.free_disk(self.parts.recipe.guards, self.journal.folder)
        still_held(self.journal.folder)
        if self.parts.worker_group.applying:
            raise CheckpointError("a step's updates were under way, and the workers may hold different weights")
        held = [PartSnapshot(name=part.name, values=copy.deepcopy(part.state())) for part in self.stateful]
        self.writing = asyncio.ensure_future(self._write(clock, step, metrics, held))
        await asyncio.sleep(0)  # the workers are told before anything else is asked of them

    async def save(self, clock: Clock, *, step: int, metrics: Mapping[str, float]) -> None:
        """The checkpoint of the run as it is after `step`, and returns when it is on the disk."""
        await self.begin(clock, step=step, metrics=metrics)
        await self.settled()

    async def settled(self) -> None:
        """Returns when no checkpoint is on its way any more, and raises what went wrong with it."""
        writing = self.writing
        if writing is not None:
            seconds = self.parts.recipe.deadlines.checkpoint
            await asyncio.wait({writing}, timeout=seconds)
            if not writing.done():
                late = f"checkpoint: the one that is written to {self.journal.folder} is not there after {seconds:g} s"
                raise DeadlineError(f"{late}\n    fix: look whether the disk answers, or raise deadlines.checkpoint")
            self.writing = None
            writing.result()

    def check(self) -> None:
        """Raises what has gone wrong so far."""
        if self.writing is not None and self.writing.done():
            writing, self.writing = self.writing, None
            writing.result()

    async def close(self, *, hurry: bool) -> None:
        """The end of the run, which leaves nothing on its way, unless it is in a hurry: what is half-written then does
        not count."""
        writing, self.writing = self.writing, None
        if writing is not None:
            await asyncio.wait({writing}, timeout=HURRY if hurry else CLOSING)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, clock: Clock, step: int, metrics: Mapping[str, float], held: Sequence[PartSnapshot]) -> None:
        start, begun, version = clock.now(), time.monotonic(), self.parts.version

        def ready() -> None:
            """A checkpoint has its span in the timeline, and its steps' lines on the medium, before it has its name."""
            seconds = time.monotonic() - begun
            span = Span(stage="checkpoint", cell=LANE, start=start, seconds=seconds, step=step, version=version)
            self.journal.timeline(to_events([span], host="localhost"))
            self.journal.sync(self.checkpoints.disk)

        hashes = await self.parts.fetch()

        def save() -> Path:
            give_way()
            return self.checkpoints.save(
                step,
                parts=held,
                written=self.parts.worker_group.files.names,
                write_model=self.parts.write_model,
                metrics=metrics,
                hashes=hashes,
                ready=ready,
            )

        path = await beside(save)
        self.journal.event("checkpoint", step=step, path=str(path))
        self.durable(time.monotonic() - begun)
