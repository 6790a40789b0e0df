"""The parts of a run: who generates, judges and trains. No loop and no file formats here.

What is the same wherever the model is, and what a step asks of either kind: `local` has the model in this process,
`crewed` in others.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stretto.algorithms.base import Algorithm, build
from stretto.checks.machine.facts import cores
from stretto.environments import resolve as resolve_environment
from stretto.environments.base import Environment
from stretto.environments.chat import Sampling
from stretto.environments.hosts import EnvironmentHosts
from stretto.environments.render import Renderer
from stretto.placement.build import devices_for, plan_of
from stretto.placement.devices import DeviceKind
from stretto.placement.plan import Plan
from stretto.placement.strategies import DEFAULT
from stretto.plugins import folders_of
from stretto.recipe.describe import roles_of
from stretto.recipe.schema import Placement, Recipe
from stretto.rewards.base import Ask
from stretto.rewards.combine import Rewards
from stretto.rewards.score import Scored, Verdicts, score
from stretto.runtime.stale_batch import BatchBuffer
from stretto.runtime.user_functions import NONE_GIVEN, UserFunctions
from stretto.sandbox.pool import Pool
from stretto.scheduler.length_predictor import LengthPredictor
from stretto.tasks.source import PromptSource, load_prompts, split
from stretto.types import Prompt, Stateful, Trajectory

MOST_JUDGES = 16
"""Processes for user code. Each keeps the user's modules imported, and memory is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeBase(ABC):
    """Everything a step needs, wherever the model is."""

    recipe: Recipe
    """What was asked for."""
    plan: Plan
    """Where it lives."""
    algorithm: Algorithm
    """How rewards become a gradient."""
    environment: Environment
    """What happens between prompt and verdict."""
    hosts: EnvironmentHosts | None
    """The processes that the environment runs in, if it has any."""
    rewards: Rewards
    """The verdict."""
    pool: Pool
    """Where user code runs."""
    prompts: PromptSource
    """Prompts to train on."""
    heldout: tuple[Prompt, ...]
    """Prompts to evaluate on."""
    renderer: Renderer
    """Messages to tokens."""
    lengths: LengthPredictor
    """How long answers are expected to be."""
    ahead: BatchBuffer
    """What was sampled and not trained on yet, where samplers may lag behind."""
    base: Path | None
    """The run's own copy of the base model, where transformers could not find it by name."""
    values: Mapping[str, float]
    """Prompt id -> V*, where the algorithm reads it; empty otherwise."""
    context: int
    """Longest conversation that the model was made for."""

    @property
    def devices(self) -> dict[str, str]:
        """Cell -> its (first) device."""
        return {cell.name: cell.devices[0] for cell in self.plan.cells}

    @property
    @abstractmethod
    def version(self) -> int:
        """Of the weights that are sampled from."""

    @property
    @abstractmethod
    def stateful(self) -> tuple[Stateful, ...]:
        """What a checkpoint must hold of them."""

    @abstractmethod
    async def fetch(self) -> None:
        """Makes ready what a checkpoint is written from."""

    @abstractmethod
    async def restored(self, checkpoint: Path | None = None) -> None:
        """A checkpoint was restored, or there was none: whoever samples begins with these weights."""

    @abstractmethod
    async def memory(self) -> dict[str, float]:
        """Device -> most memory used so far, in GB."""

    @abstractmethod
    def write_model(self, folder: Path) -> None:
        """Writes the policy for others, as it was when it was fetched."""

    def sampling(self, *, temperature: float, seed: int | None = None) -> Sampling:
        """How answers are sampled: with the recipe's noise, or that of another seed."""
        return Sampling(
            seed=self.recipe.seed if seed is None else seed,
            temperature=temperature,
            max_new_tokens=self.recipe.engine.max_new_tokens,
            context=self.context,
        )

    async def score(
        self,
        trajectories: Sequence[Trajectory],
        *,
        min_samples: int,
        ask: Ask | None = None,
        begun: Sequence[asyncio.Future[Verdicts]] = (),
    ) -> Scored:
        """Judges trajectories and gathers them in groups; `ask` is how the reward model is asked within a step, `begun`
        what reward functions were given already."""
        return await score(
            trajectories,
            self.rewards,
            min_samples=min_samples,
            deadline=self.recipe.deadlines.reward,
            ask=ask,
            begun=begun,
        )

    async def close(self) -> None:
        """Leaves no process and no cache behind."""
        try:
            if self.hosts is not None:
                await self.hosts.close()
        finally:
            await self.pool.close()


def make_plan(recipe: Recipe, *, width: int = 1) -> Plan:
    """Where everything lives, with so many devices in a training cell that a strategy makes.

    The reference reads the trainer's tensors where it is the adapter switched off.
    """
    return plan_of(
        recipe.placement,
        roles=roles_of(recipe),
        devices=devices_of(recipe.placement),
        reading={"generate", "reference"} if recipe.model.adapter else {"generate"},
        width={"train": width},
        engine=recipe.engine.kind,
        updates=recipe.batch.updates,
    )


def sampling_plan(recipe: Recipe) -> Plan:
    """Where to sample and judge without training: on every device, or on the cells by hand that do it in a step."""
    section = recipe.placement
    everywhere = {"strategy": DEFAULT, "fractions": None} if section.cells is None else {}
    section = section.model_copy(update={"staleness": 0, **everywhere})
    return make_plan(recipe.model_copy(update={"placement": section})).only({"generate", "reward"})


def devices_of(section: Placement) -> tuple[str, ...]:
    """The devices that a recipe asks for; on this host, of those that there are."""
    return devices_for(section, devices_here())


def devices_here() -> list[str]:
    """Every device of this host."""
    gpus = [f"localhost/gpu:{index}" for index in range(torch.cuda.device_count())]
    return gpus + [f"localhost/cpu:{index}" for index in range(os.cpu_count() or 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTask:
    """What is asked, and what is known of it before."""

    training: tuple[Prompt, ...]
    """Prompts to train on."""
    heldout: tuple[Prompt, ...]
    """Prompts never to train on."""
    values: Mapping[str, float] | None
    """Prompt id -> V*, if the algorithm reads it."""


def load_task(recipe: Recipe, root: Path, values: Mapping[str, float] | None) -> PromptTask:
    """The prompts of a recipe."""
    training, heldout = split(load_prompts(recipe.task, root), recipe.task.holdout)
    return PromptTask(training=tuple(training), heldout=tuple(heldout), values=values)


def connect(
    recipe: Recipe,
    task: PromptTask,
    plan: Plan,
    root: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    stop: frozenset[int],
    given: UserFunctions = NONE_GIVEN,
    hosts: EnvironmentHosts | None = None,
) -> dict[str, Any]:
    """The fields of `RuntimeBase` that are the same wherever the model is."""
    folders, start = folders_of(root), recipe.deadlines.start
    pool, values = Pool(workers=judges(), paths=folders, start_deadline=start, server=given.server), task.values
    kind = recipe.environment.kind
    known = [prompt for prompt in task.training if values is None or prompt.id in values]
    prompts = PromptSource(known, seed=recipe.seed)
    return {
        "recipe": recipe,
        "plan": plan,
        "algorithm": build(recipe.algorithm, folders),
        "environment": hosts or given.environments.get(kind) or resolve_environment(kind, folders),
        "hosts": hosts,
        "rewards": Rewards(recipe.rewards, pool),
        "pool": pool,
        "prompts": prompts,
        "ahead": BatchBuffer(prompts, keeps=plan.staleness > 0),
        "heldout": task.heldout[: recipe.evaluate.prompts],
        "renderer": Renderer(tokenizer, stop=stop),
        "lengths": LengthPredictor(longest=recipe.engine.max_new_tokens),
        "values": values or {},
    }


async def start_hosts(recipe: Recipe, root: Path) -> EnvironmentHosts | None:
    """The processes of the environment, if it has any, before anything heavy is loaded."""
    section = recipe.environment
    if section.hosts in ("auto", 0):
        return None
    number, start = int(section.hosts), recipe.deadlines.start
    hosts = EnvironmentHosts(section.kind, number=number, folders=folders_of(root), start_deadline=start)
    await hosts.start()
    return hosts


def judges() -> int:
    """Processes for user code: the other half of the cores is for what generates and trains."""
    return min(max(2, cores() // 2), MOST_JUDGES)


def token_budget(recipe: Recipe, kind: DeviceKind) -> int:
    """Tokens in a micro-batch on a device of this kind."""
    budget = recipe.batch.token_budget
    return kind.micro_batch if budget == "auto" else budget
