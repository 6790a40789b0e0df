"""One process of a cell of several devices: of the models that such cells train or ask it has slices.

Of a policy that is trained in slices it serves from a full copy, which is what an engine reads, what is handed to
others and written for them; it gets the new weights once per step, gathered, and lies on the device if something there
asks it, in host memory if not. Nobody samples from a critic, so of that there are slices alone. What is frozen is cut
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stretto.models.scalar_head import FrozenScorer
from stretto.recipe.schema import UpdateSection
from stretto.training.narrow_adamw import make_optimizer
from stretto.training.optimizer import MasterAdamW
from stretto.training.parallel.fsdp import ShardedTrainer, Shards, on_the_same_tensors
from stretto.training.parallel.mesh import EXPERTS, TENSOR, CellMesh, join, leave, mesh_of, mesh_over
from stretto.training.parallel.sharded_critic import ShardedCriticTrainer
from stretto.training.parallel.sliced_scorer import FrozenModel, SlicedScorer
from stretto.training.parallel.zero1 import partition
from stretto.training.teacher import Teacher
from stretto.weights.tensors import checksums, unlike
from stretto.workers.api import CRITIC, MODELS, POLICY, TRAINS
from stretto.workers.models import critic_optimizer, critic_settings, settings_of
from stretto.workers.offload import FITTED, HeldStorages, HeldTensors
from stretto.workers.process_group import Rendezvous, wait_for_all
from stretto.workers.worker import Worker
from stretto.workers.worker_spec import WorkerSpec


class GatheredTensors(Mapping[str, Tensor]):
    """The trained tensors of a model in slices; each is put together when it is asked for, by all processes at once."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def __getitem__(self, name: str) -> Tensor:
        return self.shards.gather(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards.trained)

    def __len__(self) -> int:
        return len(self.shards.trained)


class ShardedWorker(Worker):
    """A worker that trains or asks together with others."""

    def __init__(self, assignment: WorkerSpec) -> None:
        super().__init__(assignment)
        # Model -> its slices, if it is trained in slices here.
        self.shards: dict[str, Shards] = {}

    def meet(self, kind: str, where: Rendezvous) -> None:
        """The processes of its cells are the first that it meets; only then is there something to train."""
        if kind != "cell":
            super().meet(kind, where)
            return
        meshes = self._join(where)
        self.all_have_loaded()
        for role, devices in self.assignment.slices.items():
            mesh = meshes[devices, self._like_policy(role, devices)]
            if role == "train":
                self._train_slices(mesh)
            elif role == "fit":
                self._fit_slices(mesh)
            elif role != "value" or self.critic is None:  # values of a critic that is trained are asked of its trainer
                self._ask_slices(role, mesh)

    def _like_policy(self, role: str, devices: tuple[str, ...]) -> bool:
        """Whether a role's model is cut as the policy is: it is the policy, or was the policy before training."""
        same = role == "train" or (role == "reference" and self.assignment.recipe.roles.teacher is None)
        return same and devices == self.assignment.slices.get("train")

    def _join(self, where: Rendezvous) -> dict[tuple[tuple[str, ...], bool], CellMesh]:
        """Meets them; the mesh of each cell of several devices that it is in: in slices, and as the policy is cut."""
        device, meeting = self.assignment.torch_device, self.assignment.meeting
        assert meeting is not None
        join(wait_for_all(where), rank=where.rank, size=where.size, device=device, seconds=where.seconds)
        found = {}
        for cell in meeting.cells:
            ranks = [meeting.devices.index(each) for each in cell]
            sliced = mesh_over(ranks, device=device, seconds=where.seconds)
            if sliced is not None:
                found[cell, False] = found[cell, True] = sliced
            if len(ranks) == where.size and max(self.assignment.mesh.get(axis, 1) for axis in (TENSOR, EXPERTS)) > 1:
                found[cell, True] = mesh_of(device, where.size, self.assignment.mesh)
        return found

    def _train_slices(self, mesh: CellMesh) -> None:
        """The policy, in slices beside the full copy."""
        recipe = self.assignment.recipe
        settings = settings_of(recipe, self.assignment.token_budget) | self._checkpointing("train")
        apart = on_the_same_tensors(self.policy)
        shards = Shards(apart, mesh, temperature=settings["temperature"], serving=self.policy)
        self.sleepers.add(HeldStorages({"train"}, shards.tensors, self.make_host_buffer()))
        self.optimizer = self._optimizer(POLICY, shards, recipe.optimizer)
        self.trainer.close()
        self.trainer = ShardedTrainer(shards, self.assignment.algorithm(), self.optimizer, **settings)
        self.shards[POLICY] = shards

    def _fit_slices(self, mesh: CellMesh) -> None:
        """The critic, of which nothing stays whole."""
        assert self.critic is not None
        self.trained(CRITIC).close()
        settings = critic_settings(self.assignment) | self._checkpointing("fit")
        shards = Shards(self.critic, mesh, temperature=settings["temperature"])
        optimizer = self._optimizer(CRITIC, shards, critic_optimizer(self.assignment))
        # What only an update reads sleeps until then.
        self.sleepers.add(
            HeldTensors({"fit"}, optimizer.tensors, self.make_host_buffer(), frozen=False, woken_by={FITTED})
        )
        self.sleepers.add(HeldStorages({"value", "fit"}, shards.tensors, self.make_host_buffer()))
        self.models[CRITIC] = ShardedCriticTrainer(shards, self.assignment.algorithm(), optimizer, **settings)
        self.shards[CRITIC] = shards

    def _optimizer(self, model: str, shards: Shards, section: UpdateSection) -> MasterAdamW:
        """That of its slices, or of those of them that were dealt to its cell."""
        recipe, (which, count) = self.assignment.recipe, self.assignment.share(TRAINS[model])
        self.parts[model] = partition(shards.slices(), count)
        updates = recipe.planned_updates(critic=model == CRITIC)
        return make_optimizer(self.parts[model][which], section, updates=updates, places=shards.places())

    def _ask_slices(self, role: str, mesh: CellMesh) -> None:
        """A frozen model: the one that was loaded, or the policy as it is now, before any training."""
        loaded = self.models[MODELS[role]]
        whole = loaded if isinstance(loaded, FrozenScorer | Teacher) else self._as_it_is()
        scorer = SlicedScorer(whole, mesh)
        self.sleepers.add(HeldStorages({role}, scorer.tensors, self.make_host_buffer()))
        self.models[MODELS[role]] = scorer

    def _as_it_is(self) -> FrozenModel:
        frozen, budget = on_the_same_tensors(self.policy), self.assignment.token_budget
        frozen.network.requires_grad_(False)
        temperature = settings_of(self.assignment.recipe, budget)["temperature"]
        size = len(frozen.head().weight)
        return Teacher(frozen, temperature=temperature, token_budget=budget, candidates=None, vocabulary=size)

    def _checkpointing(self, role: str) -> dict[str, Any]:
        """A trainer's setting, where the plan has decided it."""
        return {"checkpointing": True} if role in self.assignment.recomputes else {}

    def claims(self, alone: bool) -> dict[str, str]:
        """Of the full copy, unless its slices are others than its own; the rest is held against the others' slices."""
        if POLICY not in self.shards:
            return super().claims(alone)
        assert self.optimizer is not None
        trained, masters = self.policy.trained(), self.optimizer.masters
        slices = {name: self.shards[POLICY].cut(name, trained[name].detach()) for name in masters}
        return checksums(trained.items()) | dict.fromkeys(unlike(slices, masters), "another slice")

    def try_update(self, model: str) -> None:
        """The full copy is gathered anew, too."""
        super().try_update(model)
        if model in self.shards:
            self.shards[model].serve()

    def _awake(self, model: str) -> Mapping[str, Tensor]:
        """Those of a critic in slices are put together as they are asked for."""
        weights = super()._awake(model)
        return GatheredTensors(self.shards[model]) if model != POLICY and model in self.shards else weights

    def _whole(self, model: str) -> Mapping[str, Tensor]:
        """Nothing of a critic in slices."""
        return {} if model != POLICY and model in self.shards else super()._whole(model)

    def _take_up(self, model: str, state: Mapping[str, Any]) -> None:
        """Of what is trained in slices its own; a full copy follows."""
        if (shards := self.shards.get(model)) is None:
            super()._take_up(model, state)
            return
        mine = shards.cut_state(state)
        with torch.no_grad():
            for name, weight in shards.slices().items():  # those that others update, too
                weight.copy_(mine["masters"][name])
        super()._take_up(model, mine)
        shards.serve()

    def close(self) -> None:
        """Parts from the others too."""
        super().close()
        leave()
