"""Every worker of a run, and what they do together: the cells of a plan as something that can be called.

A device has one worker, which serves all cells there. What a step ends with (adding up gradients, the update, handing
weights round, the proof that all hold the same) is here; what runs when is the scheduler's business.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from stretto.engines.base import Completion
from stretto.engines.queue import EngineQueue
from stretto.errors import DeadlineError, EngineError, StrettoError, WorkerLost
from stretto.placement.plan import Plan
from stretto.placement.transport import path_between
from stretto.storage.tensors import read_parts
from stretto.threads import beside
from stretto.training import loss_counters
from stretto.training.trainer import StepReport
from stretto.types import Conversation, Sample, Weights
from stretto.weights.publish import verify_publish
from stretto.workers.api import MODELS, POLICY, WorkerApi, WorkerTransport, client
from stretto.workers.checkpoints import StateFiles
from stretto.workers.connectivity import ALLOW
from stretto.workers.deadlines import CLOSING, CLOSING_LATE, CallDeadlines, Deadline, at_most, opened
from stretto.workers.launchers.inprocess import Launcher
from stretto.workers.process_group import Rendezvous, cancel_groups
from stretto.workers.recovery import Recovery
from stretto.workers.rehearsal import Rehearsal
from stretto.workers.scatter_gather import raise_first, scatter_gather, together
from stretto.workers.stacks import StackDump
from stretto.workers.worker_spec import WorkerSpec

T = TypeVar("T")

EPOCHS = itertools.count(1)
"""Numbers of meetings; never the same one twice, because groups may share workers and their store."""


class WorkerGroup:
    """The workers of a plan."""

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        assign: Callable[[str], WorkerSpec],
        *,
        patience: CallDeadlines,
        folder: Path | None = None,
        draft: Path | None = None,
        nccl: bool = False,
    ) -> None:
        """`folder` is where it is written down which process stands where when a deadline passes, `draft` one that it
        may make for what workers write, and remove. `nccl` lets tensors pass from card to card, where they can."""
        self.plan, self.launcher, self.assign, self.patience, self.nccl = plan, launcher, assign, patience, nccl
        # Where those that wait for each other have met, by kind of group.
        self.meetings: dict[str, list[Rendezvous]] = {}
        self.device = {cell.name: cell.devices[0] for cell in plan.cells}
        self.role = {cell.name: cell.role for cell in plan.cells}
        self.devices = {cell.name: cell.devices for cell in plan.cells}
        self.training = [cell.devices for cell in plan.cells if cell.role == "train"]
        self.sliced = {cell.name for cell in plan.cells if plan.in_slices(cell)}
        # Devices that hold one whole optimizer together, copy by copy.
        self.copies = [plan.sharers] if plan.sharers else self.training
        self.members: dict[str, WorkerTransport] = {}
        self.lanes: dict[str, EngineQueue] = {}
        self.version = 0
        # True from a step's first update until that step is over.
        self.applying = False
        # What came of an update, until everybody has it.
        self.updated: StepReport | None = None
        # Seconds for which gradients have been reduced so far; in steps they are part of `publish`.
        self.reducing = 0.0
        self.silent: set[str] = set()
        self.last = time.monotonic()
        # When the start must be over, until it is.
        self.by: float | None = None
        self.seen = StackDump(launcher, folder)
        self.recovery = Recovery(self)
        self.files = StateFiles(self, draft)
        self.rehearsal = Rehearsal(self)

    @property
    def trainers(self) -> list[str]:
        """Devices that train, in the plan's order."""
        return [device for devices in self.training for device in devices]

    @property
    def holders(self) -> list[str]:
        """Devices that hold the policy: those that train, then those that only generate."""
        return list(self.plan.holders)

    async def start(self, *, by: float | None = None) -> None:
        """Starts every worker; they load side by side. All of it must be over `by` a time of the monotonic clock."""
        self.by = by
        await opened(self.launcher.open(), self._starting, self)
        devices = self.plan.devices
        started = await asyncio.gather(*(self.launch(device) for device in devices))
        self.members = dict(zip(devices, started, strict=True))
        for cell in self.plan.cells:
            if cell.role == "generate":
                self.lanes[cell.name] = self._lane(cell.name)
        await self.reach(devices)
        for mates in self.training:
            if len(mates) > 1:
                await self._meet("cell", f"cell-{next(EPOCHS)}", mates)
        await self.meet()
        await self.verify_publish(list(dict.fromkeys([*self.holders, *devices])), whole=True)
        self.by = None

    @property
    def _starting(self) -> float:
        """Seconds for a worker to load, or to find the others: what is left of the start while that is under way."""
        return self.patience.start if self.by is None else max(1.0, self.by - time.monotonic())

    async def reach(self, devices: Sequence[str]) -> None:
        """Raises unless every worker reaches every other; those in threads of one process need not."""
        store, seconds = self.launcher.store(), self._starting
        if len(devices) < 2 or not isinstance(store, tuple):
            return
        address = store[0]
        places = await self.all(devices, lambda each: each.listen(address), seconds=seconds)
        doors = dict(zip(devices, places, strict=True))
        missed = await self.all(devices, lambda each: each.unreached(doors), seconds=seconds)
        await self.all(devices, lambda each: each.shut(), seconds=seconds)
        told = [f"{one} -> {two} at {why}" for one, m in zip(devices, missed, strict=True) for two, why in m.items()]
        if told:
            raise StrettoError(f"start: processes cannot reach each other:\n  {'; '.join(told[:8])}\n    fix: {ALLOW}")

    async def launch(self, device: str) -> WorkerTransport:
        """A worker for a device, loaded."""
        async with self._deadline("start", device, self._starting):
            return await self.launcher.start(self.assign(device))

    def _lane(self, cell: str) -> EngineQueue:
        late = partial(self._deadline, "generate", self.device[cell], self.patience.generate)
        return EngineQueue(self._caller(cell), deadline=late, together=len(self.plan.devices) == 1)

    def _caller(self, cell: str) -> Callable[..., Any]:
        worker = self.worker(self.device[cell], self.patience.generate)

        async def call(*arguments: Any) -> list[Completion]:
            try:
                return await worker.generate(*arguments)
            except (WorkerLost, DeadlineError, EngineError):
                raise
            except Exception as error:  # the engine's failure, and not that of the environment that asked
                raise EngineError(f"{cell}: {error or repr(error)}") from error

        return call

    def worker(self, device: str, seconds: float) -> WorkerApi:
        """A worker, each of whose calls ends within a deadline."""
        return client(partial(self._call, device, seconds))

    async def _call(self, device: str, seconds: float, what: str, *arguments: Any) -> Any:
        overdue = device in self.silent
        async with self._deadline(what, device, seconds):
            answer = await self.members[device].call(what, *arguments)
        self.last = time.monotonic()
        if overdue:  # it answers again; an answer to what was asked before says nothing of that
            self.silent.discard(device)
        return answer

    async def all(self, devices: Sequence[str], ask: Callable[[WorkerApi], Awaitable[T]], *, seconds: float) -> list[T]:
        """The same call of several; all of them are over when it raises."""
        calls = (ask(self.worker(device, seconds)) for device in devices)
        return await together(calls)

    def _deadline(self, stage: str, device: str, seconds: float) -> Deadline:
        return Deadline(stage, device, seconds, self)

    # What cells do ----------------------------------------------------------------------------------------------------

    async def score(self, cell: str, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """What a cell's model says: the policy, a reference, a reward model or a critic; its devices share them."""
        model, seconds = MODELS[self.role[cell]], self.patience.train
        if model == POLICY or cell in self.sliced:  # in lockstep, after which each of them knows all
            told = await self.all(self.devices[cell], lambda each: each.score(model, conversations), seconds=seconds)
            return told[0]
        return await scatter_gather(
            conversations,
            self.devices[cell],
            lambda device, share: self.worker(device, seconds).score(model, share),
        )

    async def accumulate(self, cell: str, samples: Sequence[Sample]) -> None:
        """Adds gradients on a training cell, whose devices work in lockstep; none once their update is made, which a
        process that died at it has from the others."""
        if self.updated is not None:
            return
        model, devices = MODELS[self.role[cell]], self.devices[cell]
        await self.all(devices, lambda each: each.accumulate(model, list(samples)), seconds=self.patience.train)

    # The end of a step ------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Every training cell forgets what it has accumulated."""
        await self.all(self.trainers, lambda each: each.begin(POLICY), seconds=self.patience.train)

    def reduction(self) -> dict[str, float]:
        """What adding up gradients took since this was asked last, where several workers train."""
        seconds, self.reducing = self.reducing, 0.0
        return {"seconds/reduce": seconds} if len(self.trainers) > 1 else {}

    async def apply(self, *, last: bool = True) -> StepReport:
        """Reduces and updates everywhere. The `last` update of a step is published, and everybody proves to hold the
        same."""
        if self.updated is None:
            trainers, seconds = self.trainers, self.patience.train
            if len(trainers) > 1:
                begun = time.monotonic()
                sums = loss_counters.together(await self.all(trainers, lambda each: each.sums(POLICY), seconds=seconds))
                reduced = (self.worker(device, seconds).reduce(POLICY, sums) for device in trainers)
                raise_first(await self.in_lockstep("train", reduced))
                self.reducing += time.monotonic() - begun
            self.applying = True
            await self._update(trainers, last)
        if last:
            await self.publish()
        report, self.updated = self.updated, None
        assert report is not None
        return report

    async def _update(self, trainers: Sequence[str], last: bool) -> None:
        """Every copy's update. If a process dies at it, others have made it, and the step must not be taken again."""
        calls = (self.worker(device, self.patience.train).apply(POLICY, last) for device in trainers)
        answers = await self.in_lockstep("train", calls)
        told = dict(zip(trainers, answers, strict=True))
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        lost = next((error for error in errors if isinstance(error, WorkerLost)), None)
        able = [copy for copy in self.copies if not any(isinstance(told[each], BaseException) for each in copy)]
        if able and (lost is not None or not errors):
            report = told[able[0][0]]
            assert isinstance(report, StepReport)
            self.updated, self.version = report, self.version + last
        if errors:
            raise lost or errors[0]

    async def publish(self) -> None:
        """Hands the trainers' weights to those that only generate, and compares what everybody samples from."""
        holders, seconds = self.holders, self.patience.publish
        if len(holders) > len(self.trainers):
            fetched = (self.worker(device, seconds).fetch(self.version) for device in holders)
            raise_first(await self.in_lockstep("hold", fetched))
        await self.verify_publish(holders)

    async def verify_publish(self, holders: Sequence[str], *, whole: bool = False) -> None:
        """Raises unless these devices hold the same tensors, with `whole` the frozen ones too, under this version."""
        alone, seconds = len(holders) == 1, self.patience.publish
        receipts = await self.all(holders, lambda each: each.holds(self.trainers, whole, alone), seconds=seconds)
        where = "shared" if alone else "group"
        weights = Weights(version=self.version, manifest=receipts[0].manifest, where=where)
        source = "the trainer" if alone else self.called(holders[0])
        for device, receipt in zip(holders, receipts, strict=True):
            verify_publish(weights, receipt, engine=self.called(device), source=source)

    def called(self, device: str) -> str:
        """A device with the cells that it serves, for messages."""
        cells = ", ".join(cell for cell, devices in self.devices.items() if device in devices)
        return f"{device} ({cells})"

    async def meet(self) -> None:
        """Everybody meets anew, under the name of the next epoch: of all that train, those that hold the same part."""
        epoch = next(EPOCHS)
        self.meetings.clear()
        for index, devices in enumerate(zip(*self.training, strict=True)):
            await self._meet("train", f"train-{index}-{epoch}", devices)
        await self._meet("hold", f"hold-{epoch}", self.holders)

    async def _meet(self, kind: str, name: str, devices: Sequence[str]) -> None:
        """Members of one group meet; where one dies, those that wait for it are called off."""
        store, size, seconds = self.launcher.store(), len(devices), self.patience.train
        path = path_between(devices, nccl=self.nccl)
        meetings = [
            Rendezvous(store=store, name=name, rank=rank, size=size, seconds=seconds, path=path) for rank in range(size)
        ]
        self.meetings.setdefault(kind, []).append(meetings[0])
        calls = (
            self.worker(device, self._starting).meet(kind, meeting)
            for device, meeting in zip(devices, meetings, strict=True)
        )
        raise_first(await self.in_lockstep(kind, calls))

    async def in_lockstep(self, kind: str, calls: Iterable[Awaitable[T]]) -> list[T | BaseException]:
        """What became of calls that wait for each other in groups of this kind. When one fails, nobody waits for it any
        longer: the others could not know."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.gather(*tasks)
        except Exception:
            for meeting in self.meetings.get(kind, ()):
                await beside(cancel_groups, meeting)
        return await asyncio.gather(*tasks, return_exceptions=True)

    async def memory(self) -> dict[str, float]:
        """Device -> most memory that its worker has used, in GB."""
        peaks = await self.all(list(self.members), lambda each: each.peak_memory(), seconds=self.patience.publish)
        return dict(zip(self.members, peaks, strict=True))

    # Checkpoints ------------------------------------------------------------------------------------------------------

    async def save(self, folder: Path) -> None:
        """Writes what the next step depends on into `folder/state`."""
        await self.files.save(folder, model=False)

    async def restore(self, state: Path) -> None:
        """Everybody goes on from the files of this folder."""
        await self.files.restore(self.holders, state)
        self.version = read_parts(state, "trainer")[0]["version"]
        await self.verify_publish(self.holders)

    # A deadline that passed -------------------------------------------------------------------------------------------

    async def witness(self, stage: str) -> str:
        """Writes down where every process stands, once; returns what a message says of it."""
        return await self.seen.told(f"stacks-{stage}-{self.version + 1:06d}.txt")

    async def close(self) -> None:
        """Leaves no process behind."""
        members, self.members = list(self.members.values()), {}
        seconds = CLOSING_LATE if self.silent or self.seen.asked else CLOSING
        try:
            closing = asyncio.gather(*(member.close() for member in members), return_exceptions=True)
            await at_most(seconds, closing)
        finally:
            await at_most(seconds, self.launcher.close())
