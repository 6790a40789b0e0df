"""What is asked before the first step (`runtime.memory_rehearsal`): whether devices have the memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stretto.engines.native.cache import memory_of
from stretto.errors import TrainingError
from stretto.training.rehearsal import GB, held_gb, row_fits
from stretto.training.trainer import Trainer
from stretto.types import Sample
from stretto.workers.api import CRITIC, MODELS, TRAINS
from stretto.workers.offload import FITTED, UPDATE, Offloader
from stretto.workers.scatter_gather import raise_first
from stretto.workers.worker_spec import WorkerSpec

if TYPE_CHECKING:
    from stretto.workers.worker_group import WorkerGroup


class RehearsalCalls:
    """The part of a worker that tries things."""

    assignment: WorkerSpec
    sleepers: Offloader

    def trained(self, model: str) -> Trainer:
        """What trains a model."""
        raise NotImplementedError

    def try_row(self, model: str, samples: Sequence[Sample], tokens: int, again: bool) -> bool:
        """Whether a row of so many tokens can be trained, `again` beside the gradients of one; nothing of it stays."""
        self.sleepers.enter(TRAINS[model])
        return row_fits(self.trained(model), samples, tokens, again=again)

    def limit(self, model: str, tokens: int) -> None:
        """Rows have at most so many tokens from now on."""
        self.trained(model).token_budget = tokens

    def held(self, model: str) -> dict[str, float]:
        """GB of what stays while rows come and go, by what it is for."""
        return held_gb(self.trained(model))

    def device_gb(self) -> float:
        """GB of the device's memory."""
        return memory_of(self.assignment.torch_device) / GB

    def try_update(self, model: str) -> None:
        """Makes what an update needs, and no update; for an optimizer that made none yet."""
        self.sleepers.enter(FITTED if model == CRITIC else UPDATE)
        if (optimizer := self.trained(model).optimizer) is not None:
            optimizer.rehearse()


class Rehearsal:
    """The same, asked of a group's cells."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.worker_group = worker_group

    async def try_row(self, cell: str, samples: Sequence[Sample], tokens: int, *, again: bool) -> bool:
        """Whether each device of a training cell can train a row of so many tokens, `again` beside another's gradients.

        TrainingError where some cannot, and the others wait for them: they cannot try again.
        """
        group, model = self.worker_group, self._trained(cell)
        devices, seconds = group.devices[cell], group.patience.train
        calls = (group.worker(device, seconds).try_row(model, list(samples), tokens, again) for device in devices)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        full = [device for device, fits in zip(devices, answers, strict=True) if fits is False]
        if full and any(isinstance(answer, BaseException) for answer in answers):
            raise TrainingError(
                f"memory: a row of {tokens} tokens does not fit {', '.join(full)}, for which the others of {cell} have "
                "waited in vain\n    fix: a lower batch.token_budget"
            )
        return all(raise_first(answers))

    async def limit(self, cell: str, tokens: int) -> None:
        """Rows of a training cell have at most so many tokens from now on."""
        group, model = self.worker_group, self._trained(cell)
        await group.all(group.devices[cell], lambda each: each.limit(model, tokens), seconds=group.patience.train)

    async def held(self, cell: str) -> dict[str, float]:
        """GB of what stays on the first device of a training cell, by what it is for."""
        group = self.worker_group
        return await group.worker(group.device[cell], group.patience.train).held(self._trained(cell))

    async def device_gb(self, cell: str) -> float:
        """GB of memory that the first device of a training cell has."""
        group = self.worker_group
        return await group.worker(group.device[cell], group.patience.train).device_gb()

    async def update(self) -> None:
        """Updates that change nothing, and a publish of the weights as they are."""
        group = self.worker_group
        for model in group.trained.values():
            calls = (group.worker(each, group.patience.train).try_update(model.name) for each in model.trainers)
            raise_first(await group.in_lockstep(TRAINS[model.name], calls))
        for model in group.trained.values():
            await group.updates.publish(model)

    def _trained(self, cell: str) -> str:
        """The model that a cell trains."""
        return MODELS[self.worker_group.role[cell]]
