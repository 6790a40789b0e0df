"""One process of a training cell of several devices: it trains slices of the policy, and serves from a full copy.

The copy is what an engine reads, what is handed to others and written for them; it gets the new weights once per step,
gathered. It lies on the device if something there asks it, in host memory if not.
"""

from __future__ import annotations

from stretto.training.parallel.fsdp import ShardedAdamW, ShardedTrainer, Shards, join, leave
from stretto.weights.tensors import checksums, unlike
from stretto.workers.models import settings_of
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
        mesh = join(wait_for_all(where), rank=where.rank, size=where.size, device=device, seconds=where.seconds)
        settings = settings_of(recipe, self.assignment.token_budget)
        shards = Shards(self._load(device), mesh, temperature=settings["temperature"], serving=self.policy)
        updates = recipe.run.steps * recipe.batch.updates
        self.shards = shards
        self.optimizer = ShardedAdamW(shards, recipe.optimizer, updates=updates)
        self.trainer.close()
        self.trainer = ShardedTrainer(shards, self.assignment.algorithm(), self.optimizer, **settings)

    def claims(self, alone: bool) -> dict[str, str]:
        """Of the full copy, unless its slices are others than its own; the rest is held against the others' slices."""
        assert self.optimizer is not None
        trained = self.policy.trained()
        slices = {name: self.shards.cut(name, weight.detach()) for name, weight in trained.items()}
        return checksums(trained.items()) | dict.fromkeys(unlike(slices, self.optimizer.masters), "another slice")

    def close(self) -> None:
        """Parts from the others too."""
        super().close()
        leave()
