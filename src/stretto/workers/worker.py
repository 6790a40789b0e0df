"""What one process of a run does on its device: generate, score, accumulate, update. It decides nothing.

It holds one copy of the policy, and serves every cell that the plan puts on its device: those share its tensors.
Whoever calls it (`stretto.workers.worker_group`) lives in another process or thread and passes records, never tensors
of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stretto.algorithms.base import Algorithm
from stretto.engines.base import Completion, Engine, Request
from stretto.engines.native.engine import NativeEngine
from stretto.engines.native.unpacked import UnpackedEngine
from stretto.engines.own import own_engine
from stretto.models.load import DTYPES, Policy, load
from stretto.models.memory import keep_memory, peak_gb
from stretto.models.scalar_head import FrozenScorer, base_network, load_gauge
from stretto.models.source import locate
from stretto.plugins import is_plugin
from stretto.recipe.schema import EngineSection, Recipe
from stretto.training.optimizer import MasterAdamW
from stretto.training.parallel.zero1 import deal
from stretto.training.trainer import StepReport, Trainer
from stretto.types import Conversation, Receipt, Sample
from stretto.weights.carrier import Carrier
from stretto.weights.publish import prove_equal
from stretto.weights.tensors import checksums, unlike
from stretto.workers.connectivity import ProbeServer, own_address, unreached
from stretto.workers.offload import PUBLISH, HostBuffer, sleepers_of, spare
from stretto.workers.process_group import ProcessGroup, Rendezvous
from stretto.workers.worker_spec import WorkerSpec

EngineFactory = Callable[[Policy], Engine]
"""Makes what generates with a policy."""


class Worker:
    """One process's copy of the policy and what serves it."""

    def __init__(self, assignment: WorkerSpec, make_engine: EngineFactory | None = None) -> None:
        """`make_engine` makes what generates with the policy, where it is not the recipe's engine."""
        self.assignment = assignment
        recipe, device = assignment.recipe, assignment.torch_device
        if device.type == "cpu":
            keep_memory()
            if assignment.threads:
                torch.set_num_threads(assignment.threads)
        self.policy = self._load(assignment.serving_device)
        trains = "train" in assignment.roles and assignment.mates == 1
        updates = recipe.run.steps * recipe.batch.updates
        self.parts = deal(self.policy.trained(), len(assignment.sharers) or 1)
        self.optimizer = MasterAdamW(self.parts[assignment.part], recipe.optimizer, updates=updates) if trains else None
        self.trainer = make_trainer(
            self.policy, assignment.algorithm(), recipe, self.optimizer, token_budget=assignment.token_budget
        )
        own = "reference" in assignment.roles and self.policy.adapted is None
        self.reference = self._load(device) if own else None
        if self.reference is not None:
            self.reference.network.requires_grad_(False)
        self.gauges = load_gauges(
            recipe,
            assignment.roles,
            root=assignment.root,
            base=assignment.base,
            device=device,
            token_budget=assignment.token_budget,
        )
        self.engine = make_engine(self.policy) if make_engine else engine_of(self.policy, assignment)
        self.trainer.make_room = partial(spare, self.engine)
        self.sleepers = sleepers_of(
            assignment.sleeps,
            policy=self.policy,
            readers=assignment.readers,
            optimizer=lambda: self.optimizer,
            reference=self.reference,
            gauges=self.gauges,
            engine=self.engine,
            shelf=self.make_shelf(),
        )
        self.carrier = Carrier()
        self.groups: dict[str, ProcessGroup] = {}
        self.door: ProbeServer | None = None
        self.written: TemporaryDirectory[str] | None = None

    def make_shelf(self) -> HostBuffer:
        """Where what sleeps is."""
        return HostBuffer(self.assignment.torch_device)

    def _load(self, device: torch.device) -> Policy:
        made, recipe = self.assignment, self.assignment.recipe
        files = locate(recipe.model.name, made.root)
        return load(recipe.model, files, seed=recipe.seed, device=device, base=made.base)

    # Generate ---------------------------------------------------------------------------------------------------------

    def generate(self, new: Sequence[Request], unwanted: Sequence[int], seconds: float) -> list[Completion]:
        """Takes requests in and out, and decodes until something completes or the seconds are over."""
        self.sleepers.enter("generate")
        partial = self.engine.abort(unwanted) if unwanted else []
        self.engine.submit(new)
        return partial + self.engine.step(seconds)

    def settle(self) -> None:
        """What was sampled so far is final."""
        self.engine.settle()

    # Score and train --------------------------------------------------------------------------------------------------

    def score(self, role: str, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """What the model of a role says: of policy and reference, the log-probability of every trained token."""
        self.sleepers.enter(role)
        if role in self.gauges:
            return self.gauges[role].score(conversations)
        if role == "train":
            return self.trainer.score(conversations)
        scorer, without_adapter = self.reference or self.policy, self.reference is None
        return self.trainer.score(conversations, reference=scorer, without_adapter=without_adapter)

    def begin(self) -> None:
        """Forgets what a step has accumulated here."""
        self.trainer.begin()

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Adds the gradients of these samples."""
        self.sleepers.enter("train")
        self.trainer.accumulate(samples)

    def sums(self) -> dict[str, float]:
        """The counters of what was accumulated here."""
        return dict(self.trainer.meter.sums)

    # Who reaches whom -------------------------------------------------------------------------------------------------

    def listen(self, toward: str) -> tuple[str, int]:
        """Opens a door for the others, at the address by which this host reaches `toward`."""
        self.door = ProbeServer(own_address(toward))
        return self.door.place

    def unreached(self, doors: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Which of the others' doors do not answer, and why."""
        return unreached(doors)

    def shut(self) -> None:
        """Closes the door."""
        if self.door is not None:
            self.door.close()

    # The end of a step ------------------------------------------------------------------------------------------------

    def meet(self, kind: str, where: Rendezvous) -> None:
        """Joins the others that train, or the others that hold the policy."""
        self.groups.pop(kind, None)
        if where.size > 1:
            self.groups[kind] = ProcessGroup(where)

    def reduce(self, sums: Mapping[str, float]) -> None:
        """Adds up the gradients of all that train; `sums` are their counters together. Changes no weight."""
        self.sleepers.enter("train")
        group = self.groups.get("train")
        keep = not self.assignment.parted  # who parts with its part of the optimizer ends the run anyway
        self.trainer.reduce(group.add if group else lambda tensor: None, sums, keep=keep)

    def apply(self, last: bool = True) -> StepReport:
        """One update from what was reduced; where the optimizer is shared, all hand round what they have updated.

        The weights have a new version after the `last` one of a step.
        """
        self.sleepers.enter(PUBLISH if last else "train")
        report = self.trainer.apply()
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

    def holds(self, trainers: Sequence[str], whole: bool = False, alone: bool = False) -> Receipt:
        """Version and checksums of the tensors that this process's engine reads; with `whole`, of frozen ones too.

        Those of `trainers` come from their own optimizers, and are held against them as well. Where a process is
        `alone` with the policy there is nobody to compare checksums with, and none are made.
        """
        self.sleepers.enter(PUBLISH)
        trained, network = self.policy.trained(), self.policy.network
        if self.optimizer is not None and self.assignment.device in trainers:
            prove_equal(
                self.unlike(),
                of=len(trained),
                version=self.trainer.version,
                engine=self.assignment.device,
                source="its optimizer",
            )
        if alone:
            return Receipt(version=self.engine.holds().version, manifest={}, shared=True)
        read = [*network.named_parameters(), *network.named_buffers()] if whole else trained.items()
        return Receipt(version=self.engine.holds().version, manifest=checksums(read), shared=False)

    def unlike(self) -> list[str]:
        """Names of the tensors that are not what this process's optimizer made."""
        assert self.optimizer is not None
        trained, masters = self.policy.trained(), self.optimizer.masters
        return unlike({name: trained[name] for name in masters}, masters)

    def peak_memory(self) -> float:
        """Most memory that this process has used, in GB."""
        return peak_gb()

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save(self, folder: Path, base: Path | None) -> None:
        """Writes the policy for others into a folder of this host; `base` is the run's copy of the base model."""
        self.sleepers.enter(PUBLISH)
        self.policy.save(folder, base=base)

    def save_here(self, base: Path | None) -> list[str]:
        """Writes it where only this process looks, and returns its files, which `saved` hands out: the run folder may
        be on another host."""
        self.written = TemporaryDirectory(prefix="stretto-")
        folder = Path(self.written.name)
        self.save(folder, base)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def saved(self, name: str) -> bytes:
        """A file of what was written last."""
        assert self.written is not None
        return Path(self.written.name, name).read_bytes()

    def sweep(self) -> None:
        """Removes what was written; a process that is killed would leave it behind."""
        if self.written is not None:
            self.written.cleanup()
            self.written = None

    def facts(self) -> tuple[PreTrainedTokenizerBase, int, frozenset[int]]:
        """The model's tokenizer, its longest context, and the tokens that end an answer."""
        return self.policy.tokenizer, self.policy.context, self.policy.stop_tokens

    def room(self) -> int:
        """Tokens that the cache of its engine holds."""
        return self.engine.facts.kv_tokens

    def state(self) -> dict[str, Any]:
        """What the next step depends on."""
        assert self.optimizer is not None
        self.sleepers.enter(PUBLISH)
        return {
            "trainer": self.trainer.state(),
            "optimizer": self.optimizer.state(),
            "engine": dict(self.engine.state()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, with all of the policy and what it has of the optimizer."""
        self.sleepers.enter(PUBLISH)
        self.trainer.restore(state["trainer"])
        self._hold(state["optimizer"]["masters"])
        if self.optimizer is not None:
            self.optimizer.restore(state["optimizer"])
        self.engine.restore(state["engine"])
        self.carrier.tell(self.trainer.shared(), self.engine)

    def _hold(self, masters: Mapping[str, Tensor]) -> None:
        """Takes the policy from masters, as an optimizer rounds them."""
        with torch.no_grad():
            for name, weight in self.policy.trained().items():
                weight.copy_(masters[name])

    def close(self) -> None:
        """Frees what it holds, and leaves the others; a group's connections stay open as long as anybody knows it."""
        self.engine.close()
        self.trainer.close()
        self.groups.clear()


def make_trainer(
    policy: Policy, algorithm: Algorithm, recipe: Recipe, optimizer: MasterAdamW | None, *, token_budget: int
) -> Trainer:
    """What trains a policy as a recipe says, in this process or in a worker's."""
    return Trainer(policy, algorithm, optimizer, **settings_of(recipe, token_budget))


def settings_of(recipe: Recipe, token_budget: int) -> dict[str, Any]:
    """What a trainer takes from a recipe."""
    return {
        "token_budget": token_budget,
        "temperature": recipe.engine.temperature,
        "clip": recipe.optimizer.clip,
        "checkpointing": recipe.optimizer.checkpointing,
        "staleness": recipe.placement.staleness,
    }


def load_gauges(
    recipe: Recipe,
    roles: frozenset[str],
    *,
    root: Path,
    base: Path | None,
    device: torch.device,
    token_budget: int,
) -> dict[str, FrozenScorer]:
    """Role -> its frozen model, of those roles among these that are played by one; the same in every process."""
    own = base_network(recipe.model, locate(recipe.model.name, root), seed=recipe.seed, device=device, base=base)
    sections = {"reward": recipe.roles.reward_model, "value": recipe.roles.critic}
    return {
        role: load_gauge(
            role,
            locate(section.name, root),
            base=own,
            dtype=DTYPES[recipe.model.dtype],
            device=device,
            seed=recipe.seed,
            token_budget=token_budget,
        )
        for role, section in sections.items()
        if role in roles and section is not None and section.name is not None
    }


def engine_of(policy: Policy, assignment: WorkerSpec) -> Engine:
    """What generates with a policy: the recipe's engine, or one of the user's."""
    if is_plugin(kind := assignment.recipe.engine.kind):
        return own_engine(kind, policy, assignment.folders, where=assignment.where)
    return native_engine(policy, assignment.recipe.engine)


def native_engine(policy: Policy, section: EngineSection) -> NativeEngine:
    """The engine that reads the policy's own tensors."""
    if policy.apart:
        return UnpackedEngine(policy, memory_share=section.memory_share)
    return NativeEngine(policy, memory_share=section.memory_share, speculate=section.speculate)
