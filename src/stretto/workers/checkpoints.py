"""What a checkpoint takes from the workers, as files: each writes what it holds, and reads what it needs.

A folder with a state has `trainer` and `optimizer`, the last in as many parts as devices hold one whole optimizer
together, and two files more of a critic that is trained. Whoever reads it may be another number of devices. The driver
sees names of files, and where a worker's host does not have the folder (`workers.shared_folder`) pieces of them that it
passes on.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from stretto.errors import CheckpointError, TrainingError, WorkerLost
from stretto.storage.atomic import storing
from stretto.storage.manifest import STATE
from stretto.workers.api import POLICY, STATES, TRAINS
from stretto.workers.scatter_gather import together
from stretto.workers.shared_folder import SavedFiles, emptied, fetch, listing, send

if TYPE_CHECKING:
    from stretto.workers.worker_group import WorkerGroup


def names_of(models: Collection[str]) -> tuple[str, ...]:
    """Parts of a checkpoint that live in the workers, which train these models."""
    return tuple(name for model in TRAINS if model in models for name in STATES[model])


def written_by(roles: Collection[str]) -> tuple[str, ...]:
    """The same of a step of these roles."""
    return names_of([model for model, role in TRAINS.items() if role in roles])


PAUSES = 0.005, 0.25
"""Seconds between two questions whether a worker has written, at first and at most."""

LOOK = 1.0
"""Seconds between two looks whether a worker that does not answer is overdue with something else."""

HURRY = 5.0
"""Seconds for the last checkpoint of a run that ends because a worker has fallen silent."""


class StateFiles:
    """Writes and reads the state of a group's workers."""

    def __init__(self, worker_group: WorkerGroup, draft: Path | None) -> None:
        """`draft` is a folder that the group may make and remove, for checkpoints; beside it is another, for workers
        that come back."""
        self.worker_group, self.draft = worker_group, draft
        self.lent = draft and draft.with_name(f"{draft.name}.lent")
        self.alone = asyncio.Lock()
        # What is written is what the weights are until then.
        self.written = asyncio.Event()
        self.written.set()

    @property
    def names(self) -> tuple[str, ...]:
        """Parts of a checkpoint that these workers write and read."""
        return names_of(self.worker_group.trained) or names_of([POLICY])

    async def save(self, folder: Path, *, base: Path | None = None, model: bool = True) -> dict[str, str]:
        """The policy for others, and below it in `state/` what the next step depends on. What was there before is gone.
        Returns the XXH3 of files that were hashed as they were written.

        The workers go on with other calls meanwhile; an update waits. `base` is the run's copy of the base model.
        Devices that hold one whole optimizer are asked: not those that have fallen silent, nor those that were just
        started and have nothing yet. After a death at it, others are.
        """
        self.written.clear()
        try:
            async with self.alone:
                return await self._save_somewhere(folder, base=base, model=model)
        finally:
            self.written.set()

    async def _save_somewhere(self, folder: Path, *, base: Path | None, model: bool) -> dict[str, str]:
        worker_group = self.worker_group
        while True:
            gone = worker_group.silent | worker_group.recovery.lost
            asked: dict[str, tuple[str, ...]] = {}
            for name, trained in worker_group.trained.items():
                answering = [copy for copy in trained.copies if not gone & set(copy)]
                if not answering:
                    silent = ", ".join(device for device in trained.trainers if device in gone)
                    raise TrainingError(f"no whole optimizer is left to ask, because {silent} does not answer")
                asked[name] = answering[0]
            seconds = min(worker_group.patience.train, HURRY) if worker_group.silent else worker_group.patience.train
            try:
                return await self._save(folder, asked, seconds, base=base, model=model)
            except WorkerLost as lost:
                if lost.cell not in worker_group.silent:
                    worker_group.recovery.lost.add(lost.cell)

    async def _save(
        self,
        folder: Path,
        asked: Mapping[str, Sequence[str]],
        seconds: float,
        *,
        base: Path | None = None,
        model: bool = False,
    ) -> dict[str, str]:
        hashes = dict[str, str]()
        # Of a name that nobody had before: who is not waited for any longer may still write to another.
        place = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
        with storing(folder, CheckpointError):
            try:
                mark = emptied(place)
                there = listing(place)

                async def write(name: str, part: int, device: str) -> None:
                    worker = self.worker_group.worker(device, seconds)
                    exports = model and name == POLICY and part == 0
                    await worker.save(name, place, there, part, len(asked[name]), exports, base)
                    written = await self._saved(device, seconds)
                    for file in written.fetched:
                        await fetch(place, file, worker.read)
                    await worker.clear()
                    hashes.update(written.hashes)

                # The policy last: its model lies beside the mark by which hosts know the folder.
                for name in sorted(asked, key=lambda name: name == POLICY):
                    await together(write(name, part, device) for part, device in enumerate(asked[name]))
                mark.unlink()
                shutil.rmtree(folder, ignore_errors=True)
                place.rename(folder)
            finally:
                shutil.rmtree(place, ignore_errors=True)
        return hashes

    async def _saved(self, device: str, seconds: float) -> SavedFiles:
        """The files once a worker has written. It is asked again and again, because other calls come between;
        what it is busy with then may take long, and only when that is overdue is it not waited for."""
        pause, most = PAUSES
        while True:
            asking = asyncio.ensure_future(self.worker_group.worker(device, seconds).saved())
            try:
                while not asking.done():
                    await asyncio.wait({asking}, timeout=LOOK)
                    if device in self.worker_group.silent and not asking.done():
                        raise WorkerLost(device, "it does not answer")
            finally:
                asking.cancel()
            if (written := asking.result()) is not None:
                return written
            await asyncio.sleep(pause)
            pause = min(2 * pause, most)

    async def restore(self, devices: Sequence[str], state: Path) -> None:
        """Lets the devices go on from the files of this folder."""
        seconds, there = self.worker_group.patience.train, listing(state)

        async def read(device: str) -> None:
            worker = self.worker_group.worker(device, seconds)
            if not await worker.restore(state, there):
                for path in sorted({path for name in self.names for path in state.glob(f"{name}*")}):
                    await send(path, worker.append)
                await worker.restore(None, {})
                await worker.clear()

        await together(map(read, devices))

    async def hand_over(self, living: Mapping[str, Sequence[str]], device: str) -> None:
        """Gives a new worker the state of each model from one that lives, or from those that hold it together."""
        with TemporaryDirectory(prefix="stretto-") as beside:
            folder = self.lent or Path(beside, "state")
            async with self.alone:
                await self._save(folder, living, self.worker_group.patience.train)
            await self.restore([device], folder / STATE)
            if self.lent is not None:
                shutil.rmtree(self.lent, ignore_errors=True)

    def forget(self) -> None:
        """Removes drafts that nobody took."""
        for draft in self.draft.parent.glob(f"{self.draft.name}*") if self.draft is not None else ():
            shutil.rmtree(draft, ignore_errors=True)
