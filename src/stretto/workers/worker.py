"""What one process of a run does on its device: generate, score, accumulate, update. It decides nothing.

It holds one copy of the policy, and serves every cell that the plan puts on its device: those share its tensors.
Whoever calls it (`stretto.workers.worker_group`) lives in another process or thread and passes records, never tensors
of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stretto.algorithms.catalog import learns_from_rows
from stretto.engines.base import Completion, Request
from stretto.errors import TrainingError
from stretto.models.load import Policy
from stretto.models.memory import give_back, keep_memory, peak_gb
from stretto.training.narrow_adamw import make_optimizer
from stretto.training.parallel.zero1 import partition
from stretto.training.rounded_sums import RoundedSums
from stretto.training.trainer import StepReport, Trainer
from stretto.types import Conversation, Receipt, Sample, TrainedLogprobs, Weights
from stretto.weights.carrier import Carrier
from stretto.weights.publish import verify_equal
from stretto.weights.tensors import checksums
from stretto.workers import model_state
from stretto.workers.api import CRITIC, HOLDS, POLICY, TRAINS
from stretto.workers.checkpoint_calls import CheckpointCalls
from stretto.workers.connectivity import ProbeServer, own_address, unreachable
from stretto.workers.lanes import LaneMember
from stretto.workers.mapped_weights import LoadsBesideOthers
from stretto.workers.models import (
    EngineFactory,
    ScoringModel,
    engine_maker,
    load_critic,
    load_policy,
    load_scorers,
    make_critic_trainer,
    make_reference,
    make_trainer,
)
from stretto.workers.offload import FITTED, PUBLISH, UPDATE, FrozenModels, HostBuffer, release_caches, sleepers_of
from stretto.workers.process_group import ProcessGroup, Rendezvous
from stretto.workers.rehearsal import RehearsalCalls
from stretto.workers.shared_folder import HostFolder, Listing, SavedFiles, listing
from stretto.workers.worker_spec import WorkerSpec

ASKS = {POLICY: "train", CRITIC: "value", "reference": "reference", "reward": "reward"}
"""Model -> the role of the cells that ask it."""


class Worker(LaneMember, LoadsBesideOthers, RehearsalCalls, CheckpointCalls):
    """One process's copy of the policy and what serves it."""

    def __init__(self, assignment: WorkerSpec, make_engine: EngineFactory | None = None) -> None:
        """`make_engine` makes what generates with the policy, where it is not the recipe's engine."""
        self.assignment = assignment
        recipe, device = assignment.recipe, assignment.torch_device
        self.threads_before = torch.get_num_threads()
        if device.type == "cpu":
            keep_memory()
            if assignment.threads:
                torch.set_num_threads(assignment.threads)
        # What is the user's is found, or named, before anything is loaded for it.
        algorithm, make_engine = assignment.algorithm(), make_engine or engine_maker(assignment)
        # One after the other: those that sleep at times leave their room to what is loaded next.
        self.models: dict[str, ScoringModel] = {}
        frozen = FrozenModels(assignment.sleeps, assignment.slices, self.make_host_buffer())
        for role, scorer in load_scorers(assignment):
            self.models[CRITIC if role == "value" else role] = scorer
            frozen.add(role, scorer.parameters)
        self.policy = self._load(assignment.serving_device)
        trains = "train" in assignment.roles and "train" not in assignment.slices
        which, count = assignment.share("train")
        self.parts = {POLICY: partition(self.policy.trained(), count)}
        mine = self.parts[POLICY][which]
        self.optimizer = make_optimizer(mine, recipe.optimizer, updates=recipe.planned_updates()) if trains else None
        budget, whitens = assignment.token_budget, assignment.whitens
        self.trainer = make_trainer(
            self.policy, algorithm, recipe, self.optimizer, token_budget=budget, whitens=whitens
        )
        self.reference, self.models["reference"] = make_reference(assignment, self.policy, lambda: self.trainer)
        if self.reference is not None:
            frozen.add("reference", self.reference.network.parameters)
        self.critic = load_critic(assignment, self.policy)
        if self.critic is not None:
            self.parts[CRITIC] = partition(self.critic.trained(), assignment.share("fit")[1])
            self.models[CRITIC] = make_critic_trainer(self.critic, self.parts[CRITIC], assignment)
        self.engine = make_engine(self.policy)
        for model in self.held_models:
            self.trained(model).make_room = partial(release_caches, self.engine)
        self.sleepers = sleepers_of(
            assignment.sleeps,
            policy=self.policy,
            readers=assignment.readers,
            optimizer=lambda: self.optimizer,
            frozen=frozen.parts,
            critic=None if self.critic is None or "fit" in assignment.slices else self.critic,
            critic_optimizer=lambda: self.trained(CRITIC).optimizer,
            engine=self.engine,
            host_buffer=self.make_host_buffer(),
        )
        self.let_parts_sleep(self.make_host_buffer())
        give_back()
        self.carrier = Carrier()
        rounds = recipe.optimizer.reduce == "bfloat16"
        self.rounding = {model: RoundedSums() for model in self.held_models} if rounds else {}
        self.groups: dict[str, ProcessGroup] = {}
        self.probe_server: ProbeServer | None = None
        self.files = HostFolder()
        self.writing: Future[SavedFiles] | None = None

    @property
    def held_models(self) -> list[str]:
        """The models here that are trained, here or elsewhere."""
        return [model for model in TRAINS if isinstance(self.models.get(model), Trainer)]

    @property
    def trainer(self) -> Trainer:
        """What trains the policy."""
        return self.trained(POLICY)

    @trainer.setter
    def trainer(self, trainer: Trainer) -> None:
        self.models[POLICY] = trainer

    def trained(self, model: str) -> Trainer:
        """What trains a model."""
        found = self.models.get(model)
        if not isinstance(found, Trainer):
            raise TrainingError(f"{self.assignment.device}: no {model} is trained here")
        return found

    def make_host_buffer(self) -> HostBuffer:
        """Where what sleeps is."""
        return HostBuffer(self.assignment.torch_device)

    def _load(self, device: torch.device) -> Policy:
        return load_policy(self.assignment, device)

    # Generate ---------------------------------------------------------------------------------------------------------

    def generate(self, new: Sequence[Request], unwanted: Sequence[int], seconds: float) -> list[Completion]:
        """Takes requests in and out, and decodes until something completes or the seconds are over."""
        with self.in_lane():
            self.sleepers.enter("generate")
            partial = self.engine.abort(unwanted) if unwanted else []
            self.engine.submit(new)
            done = partial + self.engine.step(seconds)
        return done if self.speaks else []

    # Score and train --------------------------------------------------------------------------------------------------

    def score(self, model: str, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """What a model says: policy and reference the log-probability of every trained token."""
        self.sleepers.enter(ASKS[model])
        return self.models[model].score(conversations)

    def begin(self, model: str) -> None:
        """Forgets what a step has accumulated here."""
        self.trained(model).begin()

    def accumulate(self, model: str, samples: Sequence[Sample]) -> TrainedLogprobs:
        """Adds the gradients of these samples; returns what the policy's trainer says of those that it computed here:
        other models say values or scores."""
        self.sleepers.enter(TRAINS[model])
        trainer = self.trained(model)
        trainer.accumulate(samples)
        if model != POLICY or learns_from_rows(self.assignment.recipe.algorithm.name):
            return {}
        told = trainer.meter.logprobs
        return {sample.key: told.pop(sample.key) for sample in samples if sample.key in told}

    def loss_counters(self, model: str) -> dict[str, float]:
        """The counters of what was accumulated here."""
        return dict(self.trained(model).meter.sums)

    # Who reaches whom -------------------------------------------------------------------------------------------------

    def listen(self, toward: str) -> tuple[str, int]:
        """Opens a port for the others to try, at the address by which this host reaches `toward`; returns where."""
        self.probe_server = ProbeServer(own_address(toward))
        return self.probe_server.place

    def unreachable(self, places: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Which devices do not answer at their `places`, and why."""
        return unreachable(places)

    def stop_listening(self) -> None:
        """Closes the port that `listen` has opened."""
        if self.probe_server is not None:
            self.probe_server.close()

    # The end of a step ------------------------------------------------------------------------------------------------

    def meet(self, kind: str, where: Rendezvous) -> None:
        """Joins the others that train, that hold the policy, or that generate together with this process."""
        self.all_have_loaded()
        if (before := self.groups.pop(kind, None)) is not None:
            before.close()
        if where.size > 1:
            self.groups[kind] = ProcessGroup(where, self.assignment.torch_device)
            self.met(kind)

    def reduce(self, model: str, sums: Mapping[str, float]) -> None:
        """Adds up the gradients of all that train; `sums` are their counters together. Changes no weight."""
        self.sleepers.enter(TRAINS[model])
        group = self.groups.get(TRAINS[model])
        add = group.add if group else lambda tensor: None
        if group and model in self.rounding:
            add = self.rounding[model].over(group)
        keep = not self.assignment.parted(TRAINS[model])  # a death among those ends the run anyway
        self.trained(model).reduce(add, sums, keep=keep)

    def apply(self, model: str, last: bool) -> StepReport:
        """One update from what was reduced; where the optimizer is shared, all hand round what they have updated.

        Weights have a new version after the `last` one of a step.
        """
        self.sleepers.enter(FITTED if model == CRITIC else PUBLISH if last else UPDATE)
        report = self.trained(model).apply()
        if model in self.rounding:
            self.rounding[model].updated(report.applied)
        if len(parts := self.parts[model]) > 1:
            for owner, part in enumerate(parts):
                self.carrier.bring(part, partial(self.groups[TRAINS[model]].hand_round, source=owner))
        if last:
            self._tell(model, self.trained(model).weights())
        return report

    def _tell(self, model: str, weights: Weights) -> None:
        """New weights are for an engine, if it generates with them."""
        if model == POLICY:
            self.carrier.tell(weights, self.engine)

    def fetch(self, model: str, version: int) -> None:
        """Takes the trained tensors of the first that trains; everybody who holds the model calls this together."""
        self.carrier.bring(self._awake(model), partial(self.groups[HOLDS[model]].hand_round, source=0))
        trainer = self.trained(model)
        trainer.version = version
        self._tell(model, trainer.shared())

    def checksums(self, model: str) -> dict[str, str]:
        """What the trained tensors of a model are here."""
        return checksums(self._awake(model).items())

    def engine_weights(self, trainers: Sequence[str], whole: bool, alone: bool) -> Receipt:
        """Version and checksums of what this process's engine reads; with `whole`, of frozen tensors too.

        Those of `trainers` come from their own optimizers, and are held against them as well; an engine with tensors
        of its own is held against the policy's at the start, and always where its process is `alone` with the policy.
        An engine that shares the policy's needs nothing there but what optimizers keep apart.
        """
        self.sleepers.enter(PUBLISH)
        told, device = self.engine.holds(), self.assignment.device
        shared = alone and told.shared
        trained, network = self.policy.trained(), self.policy.network
        tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())} if whole else dict(trained)
        trains = self.optimizer is not None and device in trainers
        claims = self.claims(shared) if trains else {}
        names = claims if shared else tensors
        if not told.shared and (alone or whole):
            claims |= checksums((name, tensor) for name, tensor in tensors.items() if name not in claims)
        read = self.engine.checksums(names)
        if read is None:  # a script that multiplies nothing, or an engine that does not tell
            read = checksums((name, tensors[name]) for name in names) if told.shared else {}
        # What was not asked for is told where it is not as it should be.
        differing = {name for name in claims if read.get(name) != claims[name]} | (read.keys() - set(names))
        of, source = len(trained.keys() | set(names)), "its optimizer" if trains else "its trainer"
        verify_equal(differing, of=of, version=self.trainer.version, engine=device, source=source)
        times = getattr(self.engine, "times", None)  # engines of others need not tell
        decoding = () if times is None else times.take()
        return replace(told, manifest={} if shared else read, shared=shared, decoding=decoding)

    def claims(self, alone: bool) -> dict[str, str]:
        """Checksums of what this process's optimizer has made, rounded to what the policy computes in; `alone`, only of
        tensors that are not their own masters."""
        assert self.optimizer is not None
        held, asked = self.optimizer.parameters, self.optimizer.apart() if alone else self.optimizer.masters
        return checksums(asked.items(), rounded={name: held[name].dtype for name in asked})

    def peak_memory(self) -> float:
        """Most memory that this process has used, in GB."""
        return peak_gb()

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def model_limits(self) -> tuple[PreTrainedTokenizerBase, int, frozenset[int]]:
        """The model's tokenizer, its longest context, and the tokens that end an answer."""
        return self.policy.tokenizer, self.policy.context, self.policy.stop_tokens

    def kv_tokens(self) -> int:
        """Tokens that the cache of its engine holds."""
        return self.engine.kv_tokens

    def restore(self, folder: Path | None, there: Listing) -> bool:
        """Goes on from the files of the driver's folder, with all of each model and what it has of the optimizers.

        False if this host does not have the folder; then it is called again once they were sent, without one.
        """
        if folder is not None and listing(folder) != there:
            return False
        folder = folder or self.files.copy()
        for model in self.held_models:
            self._awake(model)
            trainer, weights = self.trained(model), self._whole(model)
            self._take_up(model, model_state.read(model, trainer, weights, folder))
            self._tell(model, trainer.shared())
        return True

    def _awake(self, model: str) -> Mapping[str, Tensor]:
        """The trained tensors of a model, where they are handed over, compared and written."""
        self.sleepers.enter(FITTED if model == CRITIC else PUBLISH)
        return self._whole(model)

    def _whole(self, model: str) -> Mapping[str, Tensor]:
        """Those that lie here in full."""
        held = self.critic if model == CRITIC and self.critic is not None else self.policy
        return held.trained()

    def _take_up(self, model: str, state: Mapping[str, Any]) -> None:
        """A model's optimizer goes on from the state of one device's, if it is updated here."""
        if (optimizer := self.trained(model).optimizer) is not None:
            optimizer.restore(state)

    def close(self) -> None:
        """Frees what it holds, and leaves the others; a group's connections stay open as long as anybody knows it."""
        self.all_have_loaded()
        self.engine.close()
        for model in self.held_models:
            self.trained(model).close()
        for group in self.groups.values():
            group.close()
        self.groups.clear()
        self.files.clear()
        torch.set_num_threads(self.threads_before)  # of whoever lent it a thread of theirs
