"""What is asked before the first step (`runtime.memory_rehearsal`): whether devices have the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stretto.training.rehearsal import held_gb, row_fits
from stretto.training.trainer import Trainer
from stretto.types import Sample
from stretto.workers.api import MODELS, POLICY
from stretto.workers.offload import UPDATE, Offloader
from stretto.workers.scatter_gather import raise_first

if TYPE_CHECKING:
    from stretto.workers.worker_group import WorkerGroup

ROLES = {model: role for role, model in MODELS.items()}
"""Model -> the role of the cells that ask it."""


class RehearsalCalls:
    """The part of a worker that tries things."""

    sleepers: Offloader

    def trained(self, model: str) -> Trainer:
        """What trains a model."""
        raise NotImplementedError

    def try_row(self, model: str, samples: Sequence[Sample], tokens: int) -> bool:
        """Whether a row of so many tokens can be trained; nothing of it stays."""
        self.sleepers.enter(ROLES[model])
        return row_fits(self.trained(model), samples, tokens)

    def limit(self, model: str, tokens: int) -> None:
        """Rows have at most so many tokens from now on."""
        self.trained(model).token_budget = tokens

    def held(self, model: str) -> dict[str, float]:
        """GB of what stays while rows come and go, by what it is for."""
        return held_gb(self.trained(model))

    def try_update(self, model: str) -> None:
        """Makes what an update needs, and no update; for an optimizer that made none yet."""
        self.sleepers.enter(UPDATE)
        if (optimizer := self.trained(model).optimizer) is not None:
            optimizer.rehearse()


class Rehearsal:
    """The same, asked of a group's cells."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self.worker_group = worker_group

    async def try_row(self, cell: str, samples: Sequence[Sample], tokens: int) -> bool:
        """Whether each device of a training cell can train a row of so many tokens."""
        group = self.worker_group
        answers = await group.all(
            group.devices[cell],
            lambda each: each.try_row(POLICY, list(samples), tokens),
            seconds=group.patience.train,
        )
        return all(answers)

    async def limit(self, cell: str, tokens: int) -> None:
        """Rows of a training cell have at most so many tokens from now on."""
        group = self.worker_group
        await group.all(group.devices[cell], lambda each: each.limit(POLICY, tokens), seconds=group.patience.train)

    async def held(self, cell: str) -> dict[str, float]:
        """GB of what stays on the first device of a training cell, by what it is for."""
        group = self.worker_group
        return await group.worker(group.device[cell], group.patience.train).held(POLICY)

    async def update(self) -> None:
        """An update that changes nothing, and a publish of the weights as they are."""
        group = self.worker_group
        calls = (group.worker(each, group.patience.train).try_update(POLICY) for each in group.trainers)
        raise_first(await group.in_lockstep("train", calls))
        await group.publish()
