"""The parts of a run on one device: the model, its engine and its trainer in this process.

Heavy things are loaded in one place, so that the loop, evaluation and the warm-up all speak to the same record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stretto.config.describe import roles_of
from stretto.config.locate import locate
from stretto.config.schema import Recipe
from stretto.execution.assignment import torch_device
from stretto.execution.sleepers import PUBLISH, Shelf, Sleepers, sleepers_of, spare
from stretto.execution.worker import load_gauges, make_trainer, native_engine
from stretto.placement.plan import Plan
from stretto.rollout.base import Engine
from stretto.rollout.collect import Collector, Launch
from stretto.run.base import Note, prepare_base
from stretto.run.parts import Parts, connect, load_task, token_budget
from stretto.train.gauge import Gauge
from stretto.train.memory import keep_memory, peak_gb
from stretto.train.model import Policy, load
from stretto.train.optim import MasterAdamW
from stretto.train.trainer import Trainer
from stretto.types import Conversation, Stateful, Trajectory, Weights
from stretto.weights.carrier import Carrier
from stretto.weights.publish import prove_equal, publish
from stretto.weights.tensors import unlike

EngineFactory = Callable[[Policy], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParts(Parts):
    """The model in this process, on one device."""

    policy: Policy
    """The model that is trained."""
    reference: Policy | None
    """A frozen copy, if the algorithm needs one and there is no adapter to switch off."""
    gauges: Mapping[str, Gauge]
    """Role -> its frozen model: reward, value."""
    engine: Engine
    """Generates."""
    trainer: Trainer
    """Learns."""
    optimizer: MasterAdamW
    """The trainer's optimizer, for checkpoints."""
    sleepers: Sleepers
    """What of them is in host memory while others work."""
    carrier: Carrier = field(default_factory=Carrier)
    """Brings new weights to the engine."""

    @property
    def version(self) -> int:
        """The trainer's."""
        return self.trainer.version

    @property
    def stateful(self) -> tuple[Stateful, ...]:
        """Prompts, lengths, and what the model is served by."""
        return (self.prompts, self.lengths, self.ahead, self.trainer, self.optimizer, self.engine)

    async def collect(
        self, launches: Sequence[Launch], *, temperature: float, seed: int | None = None
    ) -> list[Trajectory]:
        """In this process."""
        self.sleepers.enter("generate")
        collector = Collector(
            self.engine,
            environment=self.environment,
            renderer=self.renderer,
            sampling=self.sampling(temperature=temperature, seed=seed),
            environment_deadline=self.recipe.environment.deadline,
            deadline=self.recipe.deadlines.generate,
        )
        return await collector.collect(launches)

    async def measure(self, role: str, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """In this process."""
        self.sleepers.enter(role)
        return self.gauges[role].score(conversations)

    async def settle(self) -> None:
        """Tells the engine."""
        self.engine.settle()

    async def fetch(self) -> None:
        """Everything is here, and awake from now on."""
        self.sleepers.enter(PUBLISH)

    async def restored(self) -> None:
        """Tells the engine the version of the tensors that it shares."""
        self.publish(self.trainer.shared())

    def publish(self, weights: Weights) -> None:
        """Tells the engine of weights, and proves that it samples from what the optimizer made."""
        self.sleepers.enter(PUBLISH)
        publish(weights, self.engine, self.carrier)
        trained, engine = self.policy.trained(), f"the engine on {self.policy.device}"
        found = unlike(trained, self.optimizer.masters)
        prove_equal(found, of=len(trained), version=weights.version, engine=engine, source="the optimizer")

    async def memory(self) -> dict[str, float]:
        """This process's."""
        return {self.plan.cells[0].devices[0]: peak_gb()}

    def write_model(self, folder: Path) -> None:
        """From the policy itself."""
        self.policy.save(folder, base=self.base)

    async def close(self) -> None:
        """The engine's cache too."""
        self.engine.close()
        await Parts.close(self)


def assemble(
    recipe: Recipe,
    *,
    plan: Plan,
    root: Path,
    folder: Path | None,
    note: Note,
    make_engine: EngineFactory | None = None,
    values: Mapping[str, float] | None = None,
    shelf: Shelf | None = None,
) -> LocalParts:
    """Loads and connects the parts. `folder` is the run's, where a base model of its own is kept.

    With `values`, prompts that have none are not trained on. `shelf` is where what sleeps is, by default host memory.
    """
    device = torch_device(plan.devices[0])
    task = load_task(recipe, root, values)
    files = locate(recipe.model.name, root)
    base = prepare_base(recipe, files=files, folder=folder, device=device, prompts=task.training, note=note)
    policy = load(recipe.model, files, seed=recipe.seed, device=device, base=base)
    if device.type == "cpu":
        keep_memory()
    optimizer = MasterAdamW(policy.trained(), recipe.optimizer, updates=recipe.run.steps * recipe.batch.updates)
    common = connect(recipe, task, plan, root, tokenizer=policy.tokenizer, stop=policy.stop_tokens)
    budget = token_budget(recipe, device.type)
    trainer = make_trainer(policy, common["algorithm"], recipe, optimizer, token_budget=budget)
    reference = None
    if "reference" in common["algorithm"].needs and policy.adapted is None:
        reference = load(recipe.model, files, seed=recipe.seed, device=device, base=base)
        reference.network.requires_grad_(False)
    gauges = load_gauges(recipe, roles_of(recipe), root=root, base=base, device=device, token_budget=budget)
    engine = make_engine(policy) if make_engine else native_engine(policy, recipe.engine)
    trainer.make_room = partial(spare, engine)
    sleepers = sleepers_of(
        plan.sleeps_on(plan.devices[0]),
        policy=policy,
        readers={"generate", "train", *(["reference"] if policy.adapted is not None else [])},
        optimizer=lambda: optimizer,
        reference=reference,
        gauges=gauges,
        engine=engine,
        shelf=shelf or Shelf(device),
    )
    return LocalParts(
        **common,
        sleepers=sleepers,
        policy=policy,
        reference=reference,
        gauges=gauges,
        engine=engine,
        trainer=trainer,
        optimizer=optimizer,
        base=base,
        context=policy.context,
    )
