"""One process of a training cell of several devices: it trains slices of the policy, and serves from a full copy.

The copy is what an engine reads, what is handed to others and written for them; it gets the new weights once per step,
gathered. It lies on the device if something there asks it, in host memory if not.
"""

from __future__ import annotations

from typing import Any

from stretto.training.parallel.fsdp import ShardedAdamW, ShardedTrainer, Shards, join, leave
from stretto.weights.tensors import unlike
from stretto.workers.process_group import Rendezvous, gathered
from stretto.workers.worker import Worker, settings_of


class ShardedWorker(Worker):
    """A worker that trains together with others."""

    def meet(self, kind: str, where: Rendezvous) -> None:
        """The processes of its cell are the first that it meets; only then is there something to train."""
        if kind != "cell":
            super().meet(kind, where)
            return
        recipe, device, self.first = self.assignment.recipe, self.assignment.torch_device, where.rank == 0
        mesh = join(gathered(where), rank=where.rank, size=where.size, device=device, seconds=where.seconds)
        shards = Shards(self._load(device), mesh, temperature=recipe.engine.temperature, serving=self.policy)
        updates = recipe.run.steps * recipe.batch.updates
        self.shards = shards
        self.optimizer = ShardedAdamW(shards, recipe.optimizer, updates=updates)
        self.trainer.close()
        self.trainer = ShardedTrainer(
            shards, self.assignment.algorithm(), self.optimizer, **settings_of(recipe, self.assignment.token_budget)
        )

    def unlike(self) -> list[str]:
        """Of its slices; the others hold theirs against what the rest of the copy is."""
        assert self.optimizer is not None
        slices = {name: self.shards.cut(name, weight.detach()) for name, weight in self.policy.trained().items()}
        return unlike(slices, self.optimizer.masters)

    def state(self) -> dict[str, Any]:
        """Gathered by all of them, and told by the first."""
        state = super().state()
        return state if self.first else {}

    def close(self) -> None:
        """Parts from the others too."""
        super().close()
        leave()
