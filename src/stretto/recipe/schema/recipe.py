"""The whole recipe: its sections, and the few keys that stand in none."""

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
    """One training, whole."""

    seed: int = 0
    """Seed of everything random."""
    model: ModelSection = ModelSection()
    """The model that is trained."""
    roles: Roles = Roles()
    """The other models."""
    task: TaskSection = TaskSection()
    """What it is asked."""
    environment: EnvironmentSection = SingleTurnSection()
    """What happens between prompt and verdict."""
    rewards: tuple[RewardPart, ...] = (NumericReward(),)
    """The verdict, as a weighted sum of named parts; left out where nothing is sampled to learn from or a teacher says
    all that is learned, none."""
    algorithm: AlgorithmSection = PolicyGradient()
    """How a reward becomes a gradient."""
    batch: BatchSection = BatchSection()
    """The size of a step."""
    engine: EngineSection = NativeEngineSection()
    """How answers are generated."""
    optimizer: Optimizer = Optimizer()
    """How a gradient becomes an update."""
    placement: Placement = Placement()
    """Where the models live."""
    evaluate: Evaluate = Evaluate()
    """Held-out accuracy."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What is kept."""
    guards: Guards = Guards()
    """When to stop."""
    deadlines: Deadlines = Deadlines()
    """How long waits may take."""
    log: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"] | Plugin, ...] = ("tensorboard",)
    """Where else recipe, metrics and answers go; module:name for a class of one's own."""
    run: RunSection = RunSection()
    """How long, and where to."""

    def planned_updates(self, *, critic: bool = False) -> int:
        """How many updates the policy makes in the whole run; or its critic, which learns alone at first."""
        alone = 0 if critic or self.roles.critic is None else self.roles.critic.warmup_steps
        return (self.run.steps - alone) * self.batch.updates_a_step

    def held_out(self, prompts: int) -> int:
        """How many of so many prompts are held out."""
        asked = self.evaluate.prompts if self.evaluate.every else "auto"
        return self.task.holdout.number(prompts, least=1 if asked == "auto" else asked)

    @property
    def critic_shares_base(self) -> bool:
        """True if a critic that is trained adapts the very base that the policy's adapter sits on."""
        critic = self.roles.critic
        own = critic is None or critic.name != "scratch" or critic.optimizer is None or critic.adapter is None
        return not own and self.model.adapter is not None
