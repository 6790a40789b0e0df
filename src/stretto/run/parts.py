"""The parts of a run, assembled from a recipe: who generates, judges and trains. No loop and no file formats here.

Heavy things are loaded in one place, so that the loop, evaluation and the warm-up all speak to the same record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.algorithms.base import Algorithm, build
from stretto.config.locate import ModelFiles, locate
from stretto.config.schema import EngineSection, Recipe, Scratch
from stretto.environments import resolve as resolve_environment
from stretto.environments.base import Environment
from stretto.placement.choose import plan_of
from stretto.placement.plan import Plan
from stretto.rewards.combine import Rewards
from stretto.rewards.score import Scored, score
from stretto.rollout.base import Engine
from stretto.rollout.collect import Collector, Launch
from stretto.rollout.model_handle import Sampling
from stretto.rollout.native import NativeEngine
from stretto.rollout.render import Renderer
from stretto.run.warmup import warm_up
from stretto.sandbox.pool import Pool
from stretto.tasks.source import PromptSource, load_prompts, split
from stretto.train.memory import keep_memory
from stretto.train.model import Policy, choose_device, load
from stretto.train.optim import MasterAdamW
from stretto.train.trainer import Trainer
from stretto.types import Prompt, Stateful, Trajectory

AUTO_BUDGET = {"cpu": 4096, "cuda": 16384}
"""Tokens in a micro-batch when the recipe leaves it open; running out of memory lowers it."""

Note = Callable[[str], None]
EngineFactory = Callable[[Policy], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a step needs."""

    recipe: Recipe
    """What was asked for."""
    plan: Plan
    """Where it lives."""
    policy: Policy
    """The model that is trained."""
    reference: Policy | None
    """A frozen copy, if the algorithm needs one and there is no adapter to switch off."""
    engine: Engine
    """Generates."""
    trainer: Trainer
    """Learns."""
    optimizer: MasterAdamW
    """The trainer's optimizer, for checkpoints."""
    algorithm: Algorithm
    """How rewards become a gradient."""
    environment: Environment
    """What happens between prompt and verdict."""
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
    base: Path | None
    """The run's own copy of the base model, where transformers could not find it by name."""
    values: Mapping[str, float]
    """Prompt id -> V*, where the algorithm reads it; empty otherwise."""

    async def collect(
        self, launches: Sequence[Launch], *, temperature: float, seed: int | None = None
    ) -> list[Trajectory]:
        """Runs the environment for every launch. Noise is the recipe's, or that of another `seed`."""
        recipe = self.recipe
        sampling = Sampling(
            seed=recipe.seed if seed is None else seed,
            temperature=temperature,
            max_new_tokens=recipe.engine.max_new_tokens,
            context=self.policy.context,
        )
        collector = Collector(
            self.engine,
            environment=self.environment,
            renderer=self.renderer,
            sampling=sampling,
            environment_deadline=recipe.environment.deadline,
            deadline=recipe.deadlines.generate,
        )
        return await collector.collect(launches)

    @property
    def stateful(self) -> tuple[Stateful, ...]:
        """What a checkpoint must hold of them."""
        return (self.prompts, self.trainer, self.optimizer, self.engine)

    async def score(self, trajectories: Sequence[Trajectory], *, min_samples: int) -> Scored:
        """Judges trajectories and gathers them in groups."""
        deadline = self.recipe.deadlines.reward
        return await score(trajectories, self.rewards, min_samples=min_samples, deadline=deadline)

    async def close(self) -> None:
        """Leaves no process and no cache behind."""
        self.engine.close()
        await self.pool.close()


def make_plan(recipe: Recipe) -> Plan:
    """Where everything lives. The reference reads the trainer's tensors where it is the adapter switched off."""
    kind = "cpu" if choose_device(recipe.placement.cluster).type == "cpu" else "gpu"
    asked = {"reference"} & build(recipe.algorithm).needs
    return plan_of(
        recipe.placement,
        roles={"generate", "train"} | asked,
        devices=(f"localhost/{kind}:0",),
        reading={"generate", "reference"} if recipe.model.adapter else {"generate"},
        engine=recipe.engine.kind,
        updates=recipe.batch.updates,
    )


def assemble(
    recipe: Recipe,
    *,
    plan: Plan,
    root: Path,
    folder: Path | None,
    note: Note,
    make_engine: EngineFactory | None = None,
    values: Mapping[str, float] | None = None,
) -> Parts:
    """Loads and connects the parts. `folder` is the run's, where a base model of its own is kept.

    With `values`, prompts that have none are not trained on.
    """
    prompts = load_prompts(recipe.task, root)
    training, heldout = split(prompts, recipe.task.holdout)
    device = choose_device(recipe.placement.cluster)
    algorithm = build(recipe.algorithm)
    files = locate(recipe.model.name, root)
    base = prepare_base(recipe, files=files, folder=folder, device=device, prompts=training, note=note)
    policy = load(recipe.model, files, seed=recipe.seed, device=device, base=base)
    if device.type == "cpu":
        keep_memory()
    optimizer = MasterAdamW(policy.trained(), recipe.optimizer, updates=recipe.run.steps * recipe.batch.updates)
    budget = recipe.batch.token_budget
    trainer = Trainer(
        policy,
        algorithm,
        optimizer,
        token_budget=AUTO_BUDGET[device.type] if budget == "auto" else budget,
        temperature=recipe.engine.temperature,
        clip=recipe.optimizer.clip,
        checkpointing=recipe.optimizer.checkpointing,
    )
    reference = None
    if "reference" in algorithm.needs and policy.adapted is None:
        reference = load(recipe.model, files, seed=recipe.seed, device=device, base=base)
        reference.network.requires_grad_(False)
    engine = make_engine(policy) if make_engine else native_engine(policy, recipe.engine)
    pool = Pool(workers=2, paths=[str(root), str(Path.cwd())])
    return Parts(
        recipe=recipe,
        plan=plan,
        policy=policy,
        reference=reference,
        engine=engine,
        trainer=trainer,
        optimizer=optimizer,
        algorithm=algorithm,
        environment=resolve_environment(recipe.environment.kind),
        rewards=Rewards(recipe.rewards, pool),
        pool=pool,
        prompts=PromptSource([p for p in training if values is None or p.id in values], seed=recipe.seed),
        heldout=heldout[: recipe.evaluate.prompts],
        renderer=Renderer(policy.tokenizer, stop=policy.stop_tokens),
        base=base,
        values=values or {},
    )


def native_engine(policy: Policy, section: EngineSection) -> NativeEngine:
    """The engine that reads the policy's own tensors."""
    return NativeEngine(policy, memory_share=section.memory_share, speculate=section.speculate)


def prepare_base(
    recipe: Recipe,
    *,
    files: ModelFiles,
    folder: Path | None,
    device: torch.device,
    prompts: Sequence[Prompt],
    note: Note,
) -> Path | None:
    """The run's own copy of its base model, made once and found again on resume.

    A scratch model needs one because its warm-up is part of it; a GGUF file, because an adapter must name a base that
    transformers can load. Other models are found by name, and there is none.
    """
    keeps = files.kind == "scratch" or (files.kind == "gguf" and recipe.model.adapter is not None)
    if not keeps or folder is None:
        return None
    base = folder / "base"
    if base.exists():
        return base
    plain = recipe.model.model_copy(update={"adapter": None})
    policy = load(plain, files, seed=recipe.seed, device=device)
    if files.kind == "scratch":
        warm_up(policy, recipe.model.scratch or Scratch(), prompts=prompts, seed=recipe.seed, note=note)
    draft = folder / ".base.draft"
    policy.save(draft)
    draft.rename(base)
    return base
