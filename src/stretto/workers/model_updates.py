"""The end of a step on many workers: gradients are added up, every model is updated, and whoever reads one gets it.

The order keeps a death harmless: nothing that was accumulated is given up before it was added up everywhere, and a
model whose update was made by some is not updated again. Policy and critic go through the same, one after the other;
the policy alone is published, because engines sample from it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stretto.errors import TrainingError, WorkerLost
from stretto.training import loss_counters
from stretto.training.trainer import StepReport
from stretto.workers.api import HOLDS, POLICY, TRAINS
from stretto.workers.scatter_gather import raise_first
from stretto.workers.trained_models import TrainedModel

if TYPE_CHECKING:
    from stretto.workers.worker_group import WorkerGroup


class ModelUpdates:
    """What a group's workers do together once everything is accumulated."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.worker_group = worker_group
        # Model -> what came of its update, until every model has its own and everybody has them.
        self.updated: dict[str, StepReport] = {}
        # True once a step was told to end: no update begins after that.
        self.stopped = False
        # Seconds for which gradients have been added up so far; in steps they are part of `publish`.
        self.reducing = 0.0

    def begun(self) -> bool:
        """Whether a step that is told to end has begun what must not be left half done; if not, it will not."""
        self.stopped = not self.worker_group.applying
        return self.worker_group.applying

    async def begin(self) -> None:
        """Every training cell forgets what it has accumulated."""
        group = self.worker_group
        for model in group.trained.values():
            seconds = group.patience.train
            await group.all(model.trainers, lambda each, name=model.name: each.begin(name), seconds=seconds)  # type: ignore[misc]

    async def apply(self, *, last: bool) -> StepReport:
        """Adds up and updates everywhere. The `last` update of a step is published, and everybody proves to hold the
        same."""
        group = self.worker_group
        await group.files.written.wait()  # a checkpoint is written from what is about to change
        missing = [model for name, model in group.trained.items() if name not in self.updated]
        for model in missing:
            await self._reduce(model)
        if self.stopped:
            raise asyncio.CancelledError
        group.applying = True
        for model in missing:
            await self._update(model, last)
        if last:
            for model in group.trained.values():
                await self.publish(model)
        reports, self.updated = [self.updated[name] for name in group.trained], {}
        numbers = {name: number for report in reports for name, number in report.metrics.items()}
        suspects = tuple(dict.fromkeys(key for report in reports for key in report.suspects))
        return StepReport(metrics=numbers, applied=all(report.applied for report in reports), suspects=suspects)

    async def _reduce(self, model: TrainedModel) -> None:
        group, seconds = self.worker_group, self.worker_group.patience.train
        if len(model.trainers) < 2:
            return
        begun = time.monotonic()
        told = await group.all(model.trainers, lambda each: each.loss_counters(model.name), seconds=seconds)
        sums = loss_counters.together(told)
        reduced = (group.worker(device, seconds).reduce(model.name, sums) for device in model.trainers)
        raise_first(await group.in_lockstep(TRAINS[model.name], reduced))
        self.reducing += time.monotonic() - begun

    async def _update(self, model: TrainedModel, last: bool) -> None:
        """Every copy's update. If a process dies at it, others have made it, and the step must not be taken again."""
        group, trainers = self.worker_group, model.trainers
        calls = (group.worker(device, group.patience.train).apply(model.name, last) for device in trainers)
        answers = await group.in_lockstep(TRAINS[model.name], calls)
        told = dict(zip(trainers, answers, strict=True))
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        lost = next((error for error in errors if isinstance(error, WorkerLost)), None)
        able = [copy for copy in model.copies if not any(isinstance(told[each], BaseException) for each in copy)]
        if able and (lost is not None or not errors):
            report = told[able[0][0]]
            assert isinstance(report, StepReport)
            reports = [each for each in answers if isinstance(each, StepReport)]
            suspects = tuple(dict.fromkeys(key for each in reports for key in each.suspects))
            self.updated[model.name] = replace(report, suspects=suspects)
            group.version += last and model.name == POLICY
        raise_first(answers)

    async def publish(self, model: TrainedModel) -> None:
        """Hands the trainers' weights to those that only read them, and compares what everybody holds."""
        group, name, seconds = self.worker_group, model.name, self.worker_group.patience.publish
        if len(model.holders) > len(model.trainers):
            fetched = (group.worker(device, seconds).fetch(name, group.version) for device in model.holders)
            raise_first(await group.in_lockstep(HOLDS[name], fetched))
        if name == POLICY:
            await group.verify_publish(model.holders)
        else:
            await self.verify(model, model.holders)

    async def verify(self, model: TrainedModel, devices: Sequence[str]) -> None:
        """Raises unless these devices hold the same tensors of a model that no engine samples from."""
        group = self.worker_group
        if len(model.training) == 1 and set(devices) == set(model.trainers):  # one device, or slices of one copy
            return
        held = await group.all(
            devices, lambda each: each.checksums(model.name), seconds=self.worker_group.patience.publish
        )
        for device, theirs in zip(devices, held, strict=True):
            if other := [name for name, digest in held[0].items() if theirs.get(name) != digest]:
                told = f"{len(other)} of {len(held[0])} tensors of its {model.name} are not those of {devices[0]}"
                raise TrainingError(f"publish: {group.called(device)}: {told}, such as {other[0]}")
