"""One process of a training cell of several devices: it trains slices of the policy, and serves from a full copy.

The copy is what an engine reads, what is handed to others and written for them; it gets the new weights once per step,
gathered. It lies on the device if something there asks it, in host memory if not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.training.narrow_adamw import make_optimizer
from stretto.training.parallel.fsdp import ShardedTrainer, Shards, join, leave, on_the_same_tensors
from stretto.training.parallel.mesh import CellMesh
from stretto.weights.tensors import checksums, unlike
from stretto.workers.api import POLICY
from stretto.workers.models import FrozenReference, settings_of
from stretto.workers.offload import HeldStorages
from stretto.workers.process_group import Rendezvous, wait_for_all
from stretto.workers.worker import Worker


class ShardedWorker(Worker):
    """A worker that trains together with others."""

    def meet(self, kind: str, where: Rendezvous) -> None:
        """The processes of its cell are the first that it meets; only then is there something to train."""
        if kind != "cell":
            super().meet(kind, where)
            return
        recipe, device = self.assignment.recipe, self.assignment.torch_device
        mesh = join(
            wait_for_all(where),
            rank=where.rank,
            size=where.size,
            device=device,
            seconds=where.seconds,
            degrees=self.assignment.mesh,
        )
        settings = settings_of(recipe, self.assignment.token_budget)
        apart = on_the_same_tensors(self.policy)
        shards = Shards(apart, mesh, temperature=settings["temperature"], serving=self.policy)
        updates = recipe.run.steps * recipe.batch.updates
        self.shards = shards
        self.sleepers.add(HeldStorages({"train"}, shards.tensors, self.make_shelf()))
        self.optimizer = make_optimizer(shards.slices(), recipe.optimizer, updates=updates, places=shards.places())
        reference = self._cut_reference(mesh) if self.assignment.cuts_reference else None
        self.trainer.close()
        if self.assignment.recompute:
            settings["checkpointing"] = True
        self.trainer = ShardedTrainer(shards, self.assignment.algorithm(), self.optimizer, reference, **settings)

    def _cut_reference(self, mesh: CellMesh) -> Shards:
        """The policy as it is now, before any training, in slices that stay as they are."""
        frozen = on_the_same_tensors(self.policy)
        frozen.network.requires_grad_(False)
        shards = Shards(frozen, mesh, temperature=self.assignment.recipe.engine.temperature)
        self.sleepers.add(HeldStorages({"reference"}, shards.tensors, self.make_shelf()))
        self.models["reference"] = FrozenReference(self.policy, frozen, lambda: self.trainer)
        return shards

    def claims(self, alone: bool) -> dict[str, str]:
        """Of the full copy, unless its slices are others than its own; the rest is held against the others' slices."""
        assert self.optimizer is not None
        trained = self.policy.trained()
        slices = {name: self.shards.cut(name, weight.detach()) for name, weight in trained.items()}
        return checksums(trained.items()) | dict.fromkeys(unlike(slices, self.optimizer.masters), "another slice")

    def try_update(self, model: str) -> None:
        """The full copy is gathered anew, too."""
        super().try_update(model)
        if model == POLICY:
            self.shards.serve()

    def _take_up(self, model: str, state: Mapping[str, Any]) -> None:
        """Of the policy its slices of it; the full copy follows."""
        if model != POLICY:
            super()._take_up(model, state)
            return
        super()._take_up(model, self.shards.cut_state(state))
        self.shards.serve()

    def close(self) -> None:
        """Parts from the others too."""
        super().close()
        leave()
