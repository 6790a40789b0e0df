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

from stretto.engines.queue import EngineQueue
from stretto.errors import StrettoError
from stretto.placement.plan import Plan
from stretto.placement.transport import path_between
from stretto.storage.tensors import read_parts
from stretto.threads import beside
from stretto.training.trainer import StepReport
from stretto.types import Conversation, Sample, TrainedLogprobs, Weights
from stretto.weights.publish import verify_publish
from stretto.workers.api import HOLDS, MODELS, POLICY, TRAINS, WorkerApi, WorkerTransport, client
from stretto.workers.checkpoints import StateFiles
from stretto.workers.connectivity import ALLOW
from stretto.workers.deadlines import CLOSING, CLOSING_LATE, CallDeadlines, Deadline, at_most, opened
from stretto.workers.decode_overhead import DecodeOverhead
from stretto.workers.lane_calls import LaneCalls
from stretto.workers.launchers.inprocess import Launcher
from stretto.workers.model_updates import ModelUpdates
from stretto.workers.process_group import Rendezvous, cancel_groups
from stretto.workers.recovery import Recovery
from stretto.workers.rehearsal import Rehearsal
from stretto.workers.scatter_gather import raise_first, scatter_gather, together
from stretto.workers.stacks import StackDump
from stretto.workers.startup import StartupPhases
from stretto.workers.trained_models import trained_models
from stretto.workers.worker_spec import WorkerSpec

T = TypeVar("T")

GRACE = 20.0
"""Seconds for those that work together with one that has failed to say so, too."""

EPOCHS = itertools.count(1)
"""Numbers of meetings; never the same one twice, because groups may share workers and their store."""


class WorkerGroup:
    """The workers of a plan."""

    def __init__(
        self,
        plan: Plan,
        launcher: Launcher,
        assign: Callable[[str, float], WorkerSpec],
        *,
        patience: CallDeadlines,
        folder: Path | None = None,
        draft: Path | None = None,
        nccl: bool = False,
        note: Callable[[str], object] = lambda text: None,
    ) -> None:
        """`folder` is where it is written down which process stands where when a deadline passes, `draft` one that it
        may make for what workers write, and remove. `note` is told what the start waits for. `nccl` lets tensors pass
        from card to card, where they can."""
        self.plan, self.launcher, self.assign, self.patience, self.nccl = plan, launcher, assign, patience, nccl
        # Where those that wait for each other have met, by kind of group.
        self.meetings: dict[str, list[Rendezvous]] = {}
        self.device = {cell.name: cell.devices[0] for cell in plan.cells}
        self.role = {cell.name: cell.role for cell in plan.cells}
        self.devices = {cell.name: cell.devices for cell in plan.cells}
        self.trained = trained_models(plan)
        # Cells whose devices have slices of a model each, and who meets for that.
        wide = [(cell, assign(cell.devices[0], 0.0)) for cell in plan.cells if plan.in_slices(cell)]
        self.sliced = {cell.name for cell, spec in wide if cell.role in spec.slices}
        self.joints = list(dict.fromkeys(spec.meeting.devices for _, spec in wide if spec.meeting))
        self.members: dict[str, WorkerTransport] = {}
        self.lanes: dict[str, EngineQueue] = {}
        self.lane_calls = LaneCalls(self, [cell.name for cell in plan.cells if cell.role == "generate"])
        self.version = 0
        # True from a step's first update until that step is over.
        self.applying = False
        self.updates = ModelUpdates(self)
        # Seconds for which engines were missing because their processes had died, and sums over decode steps.
        self.engines_lost = 0.0
        self.decoding = DecodeOverhead()
        self.silent: set[str] = set()
        self.last = time.monotonic()
        # When the start must be over, until it is.
        self.by: float | None = None
        self.seen = StackDump(launcher, folder)
        self.recovery, self.note = Recovery(self), note
        self.files = StateFiles(self, draft)
        self.rehearsal = Rehearsal(self)

    @property
    def training(self) -> list[tuple[str, ...]]:
        """The devices of each cell that trains the policy."""
        return list(self.trained[POLICY].training) if POLICY in self.trained else []

    @property
    def trainers(self) -> list[str]:
        """Devices that train the policy, in the plan's order."""
        return [device for devices in self.training for device in devices]

    @property
    def copies(self) -> list[tuple[str, ...]]:
        """Devices that hold one whole optimizer of the policy together, copy by copy."""
        return list(self.trained[POLICY].copies) if POLICY in self.trained else []

    @property
    def holders(self) -> list[str]:
        """Devices that hold the policy: those that train, then those that only generate."""
        return list(self.plan.holders)

    async def start(self, *, by: float | None = None) -> None:
        """Starts every worker; they load side by side. All of it must be over `by` a time of the monotonic clock."""
        self.by = by
        says = StartupPhases(self.note, devices=len(self.plan.devices))
        says(f"waiting for {self.launcher.awaited}")
        await opened(self.launcher.open(), self._starting, self)
        devices = self.plan.devices
        says(f"waiting for {len(devices)} workers to load their models")
        started = await asyncio.gather(*(self.launch(device) for device in devices))
        self.members = dict(zip(devices, started, strict=True))
        self.lanes = self.lane_calls.queues()
        says("waiting until the workers have found each other")
        await self.reach(devices)
        for mates in self.joints:
            await self.join("cell", f"cell-{next(EPOCHS)}", mates)
        await self.meet()
        await self.lane_calls.meet()
        says("comparing their weights")
        await self.verify_publish(list(dict.fromkeys([*self.holders, *devices])), whole=True)
        await self._verify_others()
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
        opened_at = await self.all(devices, lambda each: each.listen(address), seconds=seconds)
        places = dict(zip(devices, opened_at, strict=True))
        missed = await self.all(devices, lambda each: each.unreachable(places), seconds=seconds)
        await self.all(devices, lambda each: each.stop_listening(), seconds=seconds)
        told = [f"{one} -> {two} at {why}" for one, m in zip(devices, missed, strict=True) for two, why in m.items()]
        if told:
            raise StrettoError(f"start: processes cannot reach each other:\n  {'; '.join(told[:8])}\n    fix: {ALLOW}")

    async def launch(self, device: str) -> WorkerTransport:
        """A worker for a device, loaded."""
        seconds = self._starting
        async with self.deadline("start", device, seconds):
            return await self.launcher.start(self.assign(device, time.time() + seconds))

    def worker(self, device: str, seconds: float) -> WorkerApi:
        """A worker, each of whose calls ends within a deadline."""
        return client(partial(self._call, device, seconds))

    async def _call(self, device: str, seconds: float, what: str, *arguments: Any) -> Any:
        overdue = device in self.silent
        async with self.deadline(what, device, seconds):
            answer = await self.members[device].call(what, *arguments)
        self.last = time.monotonic()
        if overdue:  # it answers again; an answer to what was asked before says nothing of that
            self.silent.discard(device)
        return answer

    async def all(self, devices: Sequence[str], ask: Callable[[WorkerApi], Awaitable[T]], *, seconds: float) -> list[T]:
        """The same call of several; all of them are over when it raises."""
        calls = (ask(self.worker(device, seconds)) for device in devices)
        return await together(calls)

    async def in_cell(self, cell: str, ask: Callable[[WorkerApi], Awaitable[T]], *, seconds: float) -> list[T]:
        """The same call of a cell's devices. Where it is of several, they may wait for each other: once one has failed,
        those that do not answer soon are left behind, and count as silent."""
        calls = {asyncio.ensure_future(ask(self.worker(device, seconds))): device for device in self.devices[cell]}
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            over, waiting = await asyncio.wait(calls, timeout=GRACE)
            self.silent.update(calls[call] for call in waiting)
            return await together(call for call in calls if call in over)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def deadline(self, stage: str, who: str, seconds: float) -> Deadline:
        """What ends a wait for a device, or for a cell of several."""
        return Deadline(stage, who, seconds, self)

    # What cells do ----------------------------------------------------------------------------------------------------

    async def score(self, cell: str, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """What a cell's model says: the policy, a reference, a reward model or a critic; its devices share them."""
        model, seconds = MODELS[self.role[cell]], self.patience.train
        if cell in self.sliced:  # in lockstep, after which each of them knows all
            return (await self.in_cell(cell, lambda each: each.score(model, conversations), seconds=seconds))[0]
        return await scatter_gather(
            conversations,
            self.devices[cell],
            lambda device, share: self.worker(device, seconds).score(model, share),
        )

    async def accumulate(self, cell: str, samples: Sequence[Sample]) -> TrainedLogprobs:
        """Adds gradients on a training cell, whose devices work in lockstep; none once their update is made, which a
        process that died at it has from the others. Returns what the policy's trainer says of the tokens."""
        model, seconds = MODELS[self.role[cell]], self.patience.train
        if model in self.updates.updated:
            return {}
        told = await self.in_cell(cell, lambda each: each.accumulate(model, list(samples)), seconds=seconds)
        return {key: logprobs for found in told for key, logprobs in found.items()}

    # The end of a step ------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Every training cell forgets what it has accumulated."""
        await self.updates.begin()

    def spent(self) -> dict[str, float]:
        """What adding up gradients took since this was asked last, where several workers train, what engines whose
        process died, and which share of decoding does not grow with the answers."""
        several = any(len(model.trainers) > 1 for model in self.trained.values())
        told = {"seconds/reduce": self.updates.reducing} if several else {}
        told |= {"seconds/engine_lost": self.engines_lost} if self.engines_lost else {}
        overhead = self.decoding.share()
        told |= {} if overhead is None else {"decode/overhead": overhead}
        self.updates.reducing, self.engines_lost = 0.0, 0.0
        self.decoding.forget()
        return told

    async def apply(self, *, last: bool = True) -> StepReport:
        """Updates every model that is trained; after the `last` one of a step everybody proves to hold the same."""
        return await self.updates.apply(last=last)

    async def verify_publish(self, holders: Sequence[str], *, whole: bool = False) -> None:
        """Raises unless these devices hold the same tensors, with `whole` the frozen ones too, under this version."""
        alone, seconds = len(holders) == 1, self.patience.publish
        receipts = await self.all(
            holders, lambda each: each.engine_weights(self.trainers, whole, alone), seconds=seconds
        )
        where = "shared" if receipts[0].shared else "group"
        weights = Weights(version=self.version, manifest=receipts[0].manifest, where=where)
        self.engines_lost += sum(receipt.lost for receipt in receipts)
        source = "the trainer" if alone else self.called(holders[0])
        for device, receipt in zip(holders, receipts, strict=True):
            self.decoding.add(device, receipt.decoding)
            verify_publish(weights, receipt, engine=self.called(device), source=source)

    def called(self, who: str) -> str:
        """A device with the cells that it serves, or a cell with its devices, for messages."""
        told = self.devices.get(who) or [cell for cell, devices in self.devices.items() if who in devices]
        return f"{who} ({', '.join(told)})"

    async def meet(self) -> None:
        """Rebuilds the process groups: for each model one per optimizer shard, over all cells that train it, and one
        over all devices that hold it."""
        epoch = next(EPOCHS)
        for kind in (*TRAINS.values(), *HOLDS.values()):
            self.meetings.pop(kind, None)
        for name, model in self.trained.items():
            kind, hold = TRAINS[name], HOLDS[name]
            for index, devices in enumerate(zip(*model.training, strict=True)):
                await self.join(kind, f"{kind}-{index}-{epoch}", devices)
            await self.join(hold, f"{hold}-{epoch}", model.holders)
        if POLICY not in self.trained:
            await self.join(HOLDS[POLICY], f"{HOLDS[POLICY]}-{epoch}", self.holders)

    async def join(
        self, kind: str, name: str, devices: Sequence[str], *, seconds: float | None = None, nccl: bool | None = None
    ) -> None:
        """Members of one group meet, and wait so many seconds for each other, or as for a piece of training; where one
        dies, those that wait for it are called off."""
        store, size, seconds = self.launcher.store(), len(devices), seconds or self.patience.train
        path = path_between(devices, nccl=self.nccl if nccl is None else nccl)
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
        others = (device for model in self.trained.values() for device in model.holders)
        await self.files.restore(list(dict.fromkeys([*self.holders, *others])), state)
        self.version = read_parts(state, "trainer")[0]["version"]
        await self.verify_publish(self.holders)
        await self._verify_others()

    async def _verify_others(self) -> None:
        """Raises unless all who hold a model that no engine samples from hold the same."""
        for name, model in self.trained.items():
            if name != POLICY:
                await self.updates.verify(model, model.holders)

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
