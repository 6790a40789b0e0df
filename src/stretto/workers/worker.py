"""What one process of a run does on its device: generate, score, accumulate, update. It decides nothing.

It holds one copy of the policy, and serves every cell that the plan puts on its device: those share its tensors.
Whoever calls it (`stretto.workers.worker_group`) lives in another process or thread and passes records, never tensors
of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from stretto.engines.base import Completion, Request
from stretto.errors import CheckpointError, TrainingError
from stretto.models.load import Policy
from stretto.models.memory import keep_memory, peak_gb
from stretto.storage.atomic import storing
from stretto.storage.manifest import STATE
from stretto.storage.tensors import read_parts, write_state
from stretto.training.narrow_adamw import make_optimizer
from stretto.training.optimizer import wide_master
from stretto.training.parallel.zero1 import merge_states, partition
from stretto.training.rounded_sums import RoundedSums
from stretto.training.trainer import StepReport, Trainer
from stretto.types import Conversation, Receipt, Sample
from stretto.weights.carrier import Carrier
from stretto.weights.publish import verify_equal
from stretto.weights.tensors import checksums
from stretto.workers.api import MODELS, POLICY
from stretto.workers.connectivity import ProbeServer, own_address, unreachable
from stretto.workers.models import (
    EngineFactory,
    FrozenReference,
    ScoringModel,
    engine_of,
    load_gauges,
    load_policy,
    make_trainer,
)
from stretto.workers.offload import PUBLISH, UPDATE, HostBuffer, release_caches, sleepers_of
from stretto.workers.process_group import ProcessGroup, Rendezvous
from stretto.workers.rehearsal import ROLES, RehearsalCalls
from stretto.workers.shared_folder import HostFolder, Listing, listing
from stretto.workers.worker_spec import WorkerSpec


class Worker(RehearsalCalls):
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
        self.policy = self._load(assignment.serving_device)
        trains = "train" in assignment.roles and assignment.mates == 1
        updates = recipe.run.steps * recipe.batch.updates
        self.parts = partition(self.policy.trained(), len(assignment.sharers) or 1)
        self.optimizer = (
            make_optimizer(self.parts[assignment.part], recipe.optimizer, updates=updates) if trains else None
        )
        self.models: dict[str, ScoringModel] = {}
        self.trainer = make_trainer(
            self.policy, assignment.algorithm(), recipe, self.optimizer, token_budget=assignment.token_budget
        )
        own = "reference" in assignment.roles and self.policy.adapted is None and not assignment.cuts_reference
        self.reference = self._load(device) if own else None
        if self.reference is not None:
            self.reference.network.requires_grad_(False)
        gauges = load_gauges(
            recipe,
            assignment.roles,
            root=assignment.root,
            base=assignment.base,
            device=device,
            token_budget=assignment.token_budget,
        )
        self.models["reference"] = FrozenReference(self.policy, self.reference, lambda: self.trainer)
        self.models |= {MODELS[role]: each for role, each in gauges.items()}
        self.engine = make_engine(self.policy) if make_engine else engine_of(self.policy, assignment)
        self.trainer.make_room = partial(release_caches, self.engine)
        self.sleepers = sleepers_of(
            assignment.sleeps,
            policy=self.policy,
            readers=assignment.readers,
            optimizer=lambda: self.optimizer,
            reference=self.reference,
            gauges=gauges,
            engine=self.engine,
            shelf=self.make_shelf(),
        )
        self.carrier = Carrier()
        self.rounding = RoundedSums() if recipe.optimizer.reduce == "bfloat16" else None
        self.groups: dict[str, ProcessGroup] = {}
        self.door: ProbeServer | None = None
        self.files = HostFolder()

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

    def make_shelf(self) -> HostBuffer:
        """Where what sleeps is."""
        return HostBuffer(self.assignment.torch_device)

    def _load(self, device: torch.device) -> Policy:
        return load_policy(self.assignment, device)

    # Generate ---------------------------------------------------------------------------------------------------------

    def generate(self, new: Sequence[Request], unwanted: Sequence[int], seconds: float) -> list[Completion]:
        """Takes requests in and out, and decodes until something completes or the seconds are over."""
        self.sleepers.enter("generate")
        partial = self.engine.abort(unwanted) if unwanted else []
        self.engine.submit(new)
        return partial + self.engine.step(seconds)

    # Score and train --------------------------------------------------------------------------------------------------

    def score(self, model: str, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """What a model says: policy and reference the log-probability of every trained token."""
        self.sleepers.enter(ROLES[model])
        return self.models[model].score(conversations)

    def begin(self, model: str) -> None:
        """Forgets what a step has accumulated here."""
        self.trained(model).begin()

    def accumulate(self, model: str, samples: Sequence[Sample]) -> None:
        """Adds the gradients of these samples."""
        self.sleepers.enter(ROLES[model])
        self.trained(model).accumulate(samples)

    def sums(self, model: str) -> dict[str, float]:
        """The counters of what was accumulated here."""
        return dict(self.trained(model).meter.sums)

    # Who reaches whom -------------------------------------------------------------------------------------------------

    def listen(self, toward: str) -> tuple[str, int]:
        """Opens a door for the others, at the address by which this host reaches `toward`."""
        self.door = ProbeServer(own_address(toward))
        return self.door.place

    def unreached(self, doors: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Which of the others' doors do not answer, and why."""
        return unreachable(doors)

    def shut(self) -> None:
        """Closes the door."""
        if self.door is not None:
            self.door.close()

    # The end of a step ------------------------------------------------------------------------------------------------

    def meet(self, kind: str, where: Rendezvous) -> None:
        """Joins the others that train, or the others that hold the policy."""
        if (before := self.groups.pop(kind, None)) is not None:
            before.close()
        if where.size > 1:
            self.groups[kind] = ProcessGroup(where, self.assignment.torch_device)

    def reduce(self, model: str, sums: Mapping[str, float]) -> None:
        """Adds up the gradients of all that train; `sums` are their counters together. Changes no weight."""
        self.sleepers.enter(ROLES[model])
        group = self.groups.get("train")
        add = group.add if group else lambda tensor: None
        if group and self.rounding:
            add = self.rounding.over(group)
        keep = not self.assignment.parted  # who parts with its part of the optimizer ends the run anyway
        self.trained(model).reduce(add, sums, keep=keep)

    def apply(self, model: str, last: bool) -> StepReport:
        """One update from what was reduced; where the optimizer is shared, all hand round what they have updated.

        The policy's weights have a new version after the `last` one of a step.
        """
        self.sleepers.enter(PUBLISH if last else UPDATE)
        report = self.trained(model).apply()
        if self.rounding:
            self.rounding.updated(report.applied)
        if model != POLICY:  # nobody generates with it
            return report
        if len(self.parts) > 1:
            for owner, part in enumerate(self.parts):
                self.carrier.bring(part, partial(self.groups["train"].hand_round, source=owner))
        if last:
            self.carrier.tell(self.trainer.weights(), self.engine)
        return report

    def fetch(self, version: int) -> None:
        """Takes the trained tensors of the first that trains; everybody who holds the policy calls this together."""
        self.sleepers.enter(PUBLISH)
        self.carrier.bring(self.policy.trained(), partial(self.groups["hold"].hand_round, source=0))
        self.trainer.version = version
        self.carrier.tell(self.trainer.shared(), self.engine)

    def holds(self, trainers: Sequence[str], whole: bool, alone: bool) -> Receipt:
        """Version and checksums of what this process's engine reads; with `whole`, of frozen tensors too.

        Those of `trainers` come from their own optimizers, and are held against them as well. Where a process is
        `alone` with the policy nobody else has checksums to compare, and tensors that are their own masters need none.
        """
        self.sleepers.enter(PUBLISH)
        trained, network = self.policy.trained(), self.policy.network
        tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())} if whole else dict(trained)
        claims = self.claims(alone) if self.optimizer is not None and self.assignment.device in trainers else {}
        names = claims if alone else tensors
        read = self.engine.checksums(names)
        if read is None:  # it has no weights: a script, for tests
            read = checksums((name, tensors[name]) for name in names)
        # What was not asked for is told where it is not as it should be.
        verify_equal(
            {name for name in claims if read.get(name) != claims[name]} | (read.keys() - set(names)),
            of=len(trained),
            version=self.trainer.version,
            engine=self.assignment.device,
            source="its optimizer" if claims else "its trainer",
        )
        return Receipt(version=self.engine.holds().version, manifest={} if alone else read, shared=alone)

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

    def save_model(self, folder: Path, there: Listing, base: Path | None) -> list[str]:
        """Writes the policy for others into the driver's folder, in which it has found `there`, or returns the files
        that it is to fetch; `base` is the run's copy of the base model."""
        self.sleepers.enter(PUBLISH)
        with storing(folder, CheckpointError):
            self.policy.save(self.files.at(folder, there), base=base)
        return self.files.names()

    def save(self, folder: Path, there: Listing, part: int, of: int) -> list[str]:
        """Writes what the next step depends on, or one of several parts of it, like `save_model`, into `state/`."""
        assert self.optimizer is not None
        self.sleepers.enter(PUBLISH)
        with storing(folder, CheckpointError):
            state = self.files.at(folder, there) / STATE
            state.mkdir(exist_ok=True)
            write_state(state, self.optimizer.name, self.optimizer.state(), part=part, of=of)
            if part == 0:
                write_state(state, self.trainer.name, self.trainer.state())
        return self.files.names()

    def read(self, name: str, start: int) -> bytes:
        """A piece of a file that the driver is to fetch; an empty one at its end."""
        return self.files.read(name, start)

    def append(self, name: str, piece: bytes) -> None:
        """A piece of a file that is restored from."""
        self.files.append(name, piece)

    def clear(self) -> None:
        """Removes files that were fetched, or restored from."""
        self.files.clear()

    def facts(self) -> tuple[PreTrainedTokenizerBase, int, frozenset[int]]:
        """The model's tokenizer, its longest context, and the tokens that end an answer."""
        return self.policy.tokenizer, self.policy.context, self.policy.stop_tokens

    def room(self) -> int:
        """Tokens that the cache of its engine holds."""
        return self.engine.kv_tokens

    def restore(self, folder: Path | None, there: Listing) -> bool:
        """Goes on from the files of the driver's folder, with all of the policy and what it has of the optimizer.

        False if this host does not have the folder; then it is called again once they were sent, without one.
        """
        if folder is not None and listing(folder) != there:
            return False
        folder = folder or self.files.copy()
        self.sleepers.enter(PUBLISH)
        (trainer,) = read_parts(folder, self.trainer.name)
        optimizer = merge_states(read_parts(folder, "optimizer"))
        self.trainer.restore(trainer)
        self._hold(optimizer["masters"])
        self._take_up(optimizer)
        self.carrier.tell(self.trainer.shared(), self.engine)
        return True

    def _take_up(self, state: Mapping[str, Any]) -> None:
        """Its optimizer goes on from the state of one device's."""
        if self.optimizer is not None:
            self.optimizer.restore(state)

    def _hold(self, masters: Mapping[str, Any]) -> None:
        """Takes the policy from masters, as an optimizer rounds them."""
        with torch.no_grad():
            for name, weight in self.policy.trained().items():
                weight.copy_(wide_master(masters[name]))

    def close(self) -> None:
        """Frees what it holds, and leaves the others; a group's connections stay open as long as anybody knows it."""
        self.engine.close()
        self.trainer.close()
        for group in self.groups.values():
            group.close()
        self.groups.clear()
        self.files.clear()
        torch.set_num_threads(self.threads_before)  # of whoever lent it a thread of theirs
