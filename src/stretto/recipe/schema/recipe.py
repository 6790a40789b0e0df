"""The whole recipe: its sections and top-level keys."""

from __future__ import annotations

from typing import Literal

from stretto.recipe.schema.algorithm import AlgorithmSection, PolicyGradient
from stretto.recipe.schema.base import Plugin, Section
from stretto.recipe.schema.engine import EngineSection, NativeEngineSection
from stretto.recipe.schema.model import ModelSection, Roles
from stretto.recipe.schema.rewards import NumericReward, RewardPart
from stretto.recipe.schema.running import (
    CheckpointSection,
    Deadlines,
    Evaluate,
    Guards,
    Placement,
    RunSection,
)
from stretto.recipe.schema.task import EnvironmentSection, SingleTurnSection, TaskSection
from stretto.recipe.schema.training import BatchSection, Optimizer


class Recipe(Section):
    """A whole training recipe."""

    seed: int = 0
    """Random seed of the run: order of prompts, sampling noise, new weights."""
    model: ModelSection = ModelSection()
    """The model to train."""
    roles: Roles = Roles()
    """Further models: reference, critic, teacher, reward model."""
    task: TaskSection = TaskSection()
    """Prompts: their source, templates and held-out part."""
    environment: EnvironmentSection = SingleTurnSection()
    """Interaction between the prompt and the final reward: single turn, tools, games, memory, a program."""
    rewards: tuple[RewardPart, ...] = (NumericReward(),)
    """Parts of the reward, summed with their weights. May be empty for SFT, reward models and pure distillation."""
    algorithm: AlgorithmSection = PolicyGradient()
    """Algorithm that turns rewards into advantages and a loss."""
    batch: BatchSection = BatchSection()
    """Batch size and number of updates per step."""
    engine: EngineSection = NativeEngineSection()
    """Inference engine and sampling settings."""
    optimizer: Optimizer = Optimizer()
    """Optimizer and learning rate schedule."""
    placement: Placement = Placement()
    """Devices, and the placement of models on them."""
    evaluate: Evaluate = Evaluate()
    """Evaluation on held-out prompts."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Checkpoint schedule and retention."""
    guards: Guards = Guards()
    """Conditions that stop a run or log a warning."""
    deadlines: Deadlines = Deadlines()
    """Time limits of each stage, in seconds."""
    log: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"] | Plugin, ...] = ("tensorboard",)
    """Loggers that receive the recipe, metrics and completions. `module:name` is a class of your own."""
    run: RunSection = RunSection()
    """Number of steps, run folder and processes."""

    def planned_updates(self, *, critic: bool = False) -> int:
        """Return the number of policy updates of the whole run, without critic warm-up; or of critic updates."""
        alone = 0 if critic or self.roles.critic is None else self.roles.critic.warmup_steps
        return (self.run.steps - alone) * self.batch.updates_a_step

    def held_out(self, prompts: int) -> int:
        """Return the number of held-out prompts of a source with this many."""
        return self.task.holdout.number(prompts)

    @property
    def critic_shares_base(self) -> bool:
        """True if a trained critic's adapter uses the same base weights as the policy's adapter."""
        critic = self.roles.critic
        own = critic is None or critic.name != "scratch" or critic.optimizer is None or critic.adapter is None
        return not own and self.model.adapter is not None
