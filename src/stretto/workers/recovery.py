"""Workers that died: another in its place, with the state of one that lives, and all meet anew.

Within a step the scheduler has done again what was lost. Outside of one, what was asked is asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from stretto.errors import StateLostError, TrainingError, WorkerLost
from stretto.workers.api import POLICY
from stretto.workers.trained_models import TrainedModel

if TYPE_CHECKING:
    from stretto.workers.worker_group import WorkerGroup

T = TypeVar("T")


class Recovery:
    """Brings back the workers of a group that have died."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.worker_group = worker_group
        # Devices whose process has died and is not yet what it was; one comes back after the other.
        self.lost: set[str] = set()
        self.lock = asyncio.Lock()

    async def retry_after_worker_loss(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer to what is asked outside of a step; who dies at it is brought back, and it is asked again.

        Where nobody trains there is nothing to bring it back with, and whoever asked has lost little.
        """
        died: set[str] = set()
        while True:
            try:
                for device in sorted(self.lost):
                    await self.restart_worker(device)
                return await ask()
            except WorkerLost as lost:
                if not self.worker_group.copies:
                    raise
                if lost.cell in died:
                    told = f"{lost.cell}: its process died again ({lost.why})"
                    raise TrainingError(f"{told}; see why, for example too little memory, and resume the run") from lost
                died.add(lost.cell)
                self.lost.add(lost.cell)

    async def restart_worker(self, device: str) -> None:
        """A new worker for one that died, with the state of one that trains; all meet once nobody is missing, and
        those that it generates with once none of them is."""
        self.lost.add(device)
        async with self.lock:
            self._refuse(device)
            try:  # who else has died is found out before anybody waits for it
                asked = [each for each in self.worker_group.members if each not in self.lost]
                await self.worker_group.all(
                    asked, lambda each: each.kv_tokens(), seconds=self.worker_group.patience.train
                )
                await self._restart(device)
                self.lost.discard(device)
                if not self.lost:
                    await self.worker_group.meet()
                await self.worker_group.lane_calls.meet({device}, missing=self.lost)
            except WorkerLost as lost:
                self.lost.add(lost.cell)
                raise

    def _refuse(self, device: str) -> None:
        """StateLostError where others cannot go on without what it had: some of them may wait for it for ever."""
        models = self.worker_group.trained.values()
        if any(device in copy and len(copy) > 1 for model in models for copy in model.copies):
            told = "and its part of the optimizer with it; resume the run"
            raise StateLostError(f"{device}: its process died, {told}")
        if any(device in mates for mates in self.worker_group.joints):
            told = "and those that hold the other slices of a model cannot go on; resume the run"
            raise StateLostError(f"{device}: its process died, {told}")

    async def _restart(self, device: str) -> None:
        models = self.worker_group.trained.values()
        living = {model.name: self.living(model) for model in models if self._needs(model, device)}
        if gone := [name for name, copy in living.items() if copy is None]:
            whose = "" if gone == [POLICY] else f" of the {gone[0]}"
            raise StateLostError(f"{device}: its process died, and no other holds the optimizer{whose}; resume the run")
        with suppress(Exception):
            await self.worker_group.members[
                device
            ].close()  # dead, or it came back and lost the one whose state it was to get
        self.worker_group.members[device] = await self.worker_group.launch(device)
        copies = {name: copy for name, copy in living.items() if copy is not None}
        await self.worker_group.files.hand_over(copies, device)
        await self.worker_group.verify_publish([copies[POLICY][0], device], whole=True)

    def living(self, model: TrainedModel) -> tuple[str, ...] | None:
        """Devices that hold one whole optimizer of a model and have not died, if there are any."""
        return next((copy for copy in model.copies if not self.lost & set(copy)), None)

    def _needs(self, model: TrainedModel, device: str) -> bool:
        """Every worker has the policy, and only some have a critic."""
        return model.name == POLICY or device in model.holders
