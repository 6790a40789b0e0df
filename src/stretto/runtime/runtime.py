"""What a run works with: the plan, the models' workers, prompts, environment, rewards. No loop and no file formats
here.

One device and several are alike: the workers hold the models, whether they are threads of this process or processes of
Ray. What is random or counted (prompts, verdicts, credit) happens here, in one place.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.algorithms.base import Algorithm
from stretto.environments.addresses import Addresses
from stretto.environments.base import Environment
from stretto.environments.chat import Sampling
from stretto.environments.hosts import EnvironmentHosts
from stretto.environments.render import Renderer
from stretto.errors import CheckpointError, StrettoError
from stretto.models.stop_tokens import write_stop_tokens
from stretto.placement.plan import Plan
from stretto.recipe.schema import Recipe
from stretto.rewards.base import Ask
from stretto.rewards.combine import Rewards
from stretto.rewards.score import Scored, Verdicts, score
from stretto.runtime.kl_control import KlController
from stretto.runtime.stale_batch import BatchBuffer
from stretto.runtime.teacher_prompt import TeacherPrompt
from stretto.runtime.training_data import TrainingData
from stretto.sandbox.pool import Pool
from stretto.scheduler.length_predictor import LengthPredictor
from stretto.scheduler.speed_estimator import SpeedEstimator
from stretto.storage.manifest import STATE
from stretto.tasks.source import PromptSource
from stretto.types import Prompt, Stateful, Trajectory
from stretto.workers.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Everything a step needs."""

    recipe: Recipe
    """What was asked for."""
    plan: Plan
    """Where it lives."""
    algorithm: Algorithm
    """How rewards become a gradient."""
    whitens: bool
    """Whether gradients are whitened at the end of a step, instead of credit before it."""
    environment: Environment
    """What happens between prompt and verdict."""
    hosts: EnvironmentHosts | None
    """The processes that the environment runs in, if it has any."""
    addresses: Addresses
    """Where programs reach the model, if the environment lets any."""
    rewards: Rewards
    """The verdict."""
    pool: Pool
    """Where user code runs."""
    data: TrainingData | None
    """How rows of the task are learned from; none where they are prompts, to which answers are sampled."""
    prompts: PromptSource
    """Prompts, or rows, to train on."""
    heldout: tuple[Prompt, ...]
    """Prompts to evaluate on."""
    renderer: Renderer
    """Messages to tokens."""
    teacher_prompt: TeacherPrompt | None
    """What a teacher is asked, where that is something else than the policy is."""
    lengths: LengthPredictor
    """How long answers are expected to be."""
    ahead: BatchBuffer
    """What was sampled and not trained on yet, where samplers may lag behind."""
    kl: KlController | None
    """What moves the coefficient of a KL, if anything does."""
    base: Path | None
    """The run's own copy of the base model, where transformers could not find it by name."""
    values: Mapping[str, float]
    """Prompt id -> V*, where the algorithm reads it; empty otherwise."""
    context: int
    """Longest conversation that the model was made for."""
    worker_group: WorkerGroup
    """The worker processes, or the worker thread."""
    threads: Mapping[str, int]
    """CPU device -> threads that it computes with, where that was chosen."""
    budgets: Mapping[str, int]
    """Device -> most tokens in a piece."""
    rooms: Mapping[str, int]
    """Device that generates -> tokens that the cache of its engine holds."""
    speed: SpeedEstimator
    """How fast the workers are."""

    @property
    def devices(self) -> dict[str, str]:
        """Cell -> its (first) device."""
        return {cell.name: cell.devices[0] for cell in self.plan.cells}

    @property
    def version(self) -> int:
        """Version of the weights that all workers hold."""
        return self.worker_group.version

    @property
    def stateful(self) -> tuple[Stateful, ...]:
        """Prompts and lengths; what the workers hold is written and read by them."""
        return (self.prompts, self.lengths, self.ahead, *([self.kl] if self.kl else []))

    @property
    def crediting(self) -> Algorithm:
        """The algorithm that gives credit in this step."""
        return self.kl.algorithm if self.kl else self.algorithm

    async def fetch(self) -> dict[str, str]:
        """State and model of a worker that trains, into the group's draft; the XXH3 of some of these files."""
        if self.worker_group.applying:
            raise CheckpointError("a step's updates were under way, and the workers may hold different weights")
        draft = self.worker_group.files.draft
        return {} if draft is None else await self.worker_group.files.save(draft, base=self.base)

    async def restored(self, checkpoint: Path | None = None) -> None:
        """Everybody reads what a checkpoint holds of theirs."""
        if checkpoint is not None:
            await self.worker_group.restore(checkpoint / STATE)

    async def memory(self) -> dict[str, float]:
        """Of each worker; nothing if one has died, because a run that is over does not fail for it."""
        try:
            return await self.worker_group.memory()
        except StrettoError:
            return {}

    def write_model(self, folder: Path) -> None:
        """The files that workers have written, those of their state among them; the model in them stops as here."""
        draft = self.worker_group.files.draft
        assert draft is not None
        for path in draft.iterdir():
            shutil.move(path, folder / path.name)
        draft.rmdir()
        write_stop_tokens(folder, self.renderer.stop)

    def sampling(self, *, temperature: float, seed: int | None = None) -> Sampling:
        """How answers are sampled: with the recipe's noise, or that of another seed."""
        engine = self.recipe.engine
        return Sampling(
            seed=self.recipe.seed if seed is None else seed,
            temperature=temperature,
            max_new_tokens=self.recipe.engine.max_new_tokens,
            context=self.context,
            stop_texts=getattr(engine, "stop", None),
            top_p=engine.top_p,
            top_k=getattr(engine, "top_k", None),
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
        self.worker_group.files.forget()
        try:
            await self.addresses.close()
            await self.worker_group.close()
            if self.hosts is not None:
                await self.hosts.close()
        finally:
            await self.pool.close()
