"""Steps of given workloads under given plans on the real workers: what the planner's constants are fitted to.

Only what is asked and how long answers are is made up: prompts have the workload's tokens, answers the lengths that the
planner draws for it. Everything else is what `stretto train` does. Workers are started once and serve every workload
and plan; before each step all of them get the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from stretto.algorithms.base import build
from stretto.bench.cases import SEED
from stretto.bench.cluster_steps import COEF, SharedLauncher, key_of
from stretto.bench.forced_lengths import ForcedLengthsWorker, told
from stretto.bench.ours import RATE, InTurn, rewards_of
from stretto.bench.prepare import PreparedPrompt
from stretto.engines.queue import SLICE
from stretto.environments.render import Renderer
from stretto.placement.devices import kind_of
from stretto.placement.plan import Plan
from stretto.planner.workload import StepWorkload
from stretto.recipe.schema import (
    AlgorithmSection,
    Correction,
    Kl,
    ModelReward,
    NativeEngineSection,
    Recipe,
    RoleModel,
    Roles,
    Scratch,
)
from stretto.recipe.schema import BatchSection as BatchSection
from stretto.rewards.combine import Rewards
from stretto.runtime.build import build_runtime, token_budget
from stretto.runtime.runtime import Runtime
from stretto.runtime.schedule import take_step
from stretto.runtime.spans import Clock
from stretto.scheduler.asyncio_driver import EventLog
from stretto.scheduler.speed_estimator import SpeedEstimator
from stretto.storage.manifest import STATE
from stretto.types import Prompt
from stretto.workers.launchers.inprocess import Launcher
from stretto.workers.models import make_trainer
from stretto.workers.worker_group import WorkerGroup


class CalibrationWorker(ForcedLengthsWorker):
    """A worker that goes from one recipe to the next, with the model that it has."""

    def about(self, recipe: Recipe, budget: int) -> None:
        """What is trained from now on: another algorithm, other lengths, other micro-batches."""
        self.assignment = replace(self.assignment, recipe=recipe, token_budget=budget)
        version = self.trainer.version
        self.trainer.close()
        self.trainer = make_trainer(self.policy, build(recipe.algorithm), recipe, self.optimizer, token_budget=budget)
        self.trainer.version = version


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationStep:
    """One step that was taken."""

    seconds: float
    """How long it took, from the first prompt to the last proof."""
    stages: Mapping[str, float]
    """Seconds of each stage on a cell that serves it."""
    notes: EventLog
    """What the scheduler was told, and when."""


class CalibrationSteps:
    """Workers of some devices, and the steps they take."""

    def __init__(self, recipe: Recipe, root: Path, launcher: Launcher) -> None:
        self.recipe, self.root, self.launcher = recipe, root, SharedLauncher(launcher)
        self.folder = TemporaryDirectory(prefix="stretto-trials-")
        self.start = Path(self.folder.name, "start")
        self.steps = 0
        self.speeds: dict[str, SpeedEstimator] = {}
        self.parts: Runtime | None = None

    async def open(self, workload: StepWorkload, plan: Plan) -> None:
        """Starts the workers; the workload names every role that they will ever play, the plan every device."""
        self.parts = await build_runtime(
            trial_recipe(self.recipe, workload),
            plan=plan,
            root=self.root,
            folder=Path(self.folder.name),
            note=lambda text: None,
            launcher=self.launcher,
        )
        await self.parts.worker_group.save(self.start)

    async def step(self, workload: StepWorkload, plan: Plan) -> CalibrationStep:
        """Takes one step."""
        parts = await self._ready(workload, plan)
        clock, noted = Clock(devices=parts.devices), list[EventLog]()
        clock.begin()
        await take_step(parts, clock, step=1, noted=noted.append)
        metrics = clock.metrics()
        stages = {key.removeprefix("seconds/"): value for key, value in metrics.items() if key.startswith("seconds/")}
        return CalibrationStep(seconds=stages.pop("step"), stages=stages, notes=noted[0])

    async def _ready(self, workload: StepWorkload, plan: Plan) -> Runtime:
        """Everybody has the same weights, and knows what the step is about."""
        assert self.parts is not None
        self.steps += 1
        recipe = trial_recipe(self.recipe, workload)
        before = self.parts.worker_group
        await before.restore(self.start / STATE)
        worker_group = WorkerGroup(plan, self.launcher, before.assign, patience=before.patience)
        await worker_group.start()
        devices = list(worker_group.members)
        budgets = [cell.token_budget for cell in plan.cells if cell.token_budget]
        budget = max(budgets, default=token_budget(recipe, kind_of(devices[0])))
        await worker_group.all(devices, lambda each: told(each).about(recipe, budget), seconds=CALL)
        asked = [
            prompt_of(self.steps * PROMPTS + index, workload.prompt, self.parts.renderer, filler=filler(recipe))
            for index in range(workload.launched)
        ]
        lengths = {
            key_of(each, attempt): length
            for each, row in zip(asked, workload.drawn, strict=True)
            for attempt, length in enumerate(row)
        }
        await worker_group.all(devices, lambda each: told(each).tell(lengths, {}, False), seconds=CALL)
        return replace(
            self.parts,
            recipe=recipe,
            plan=plan,
            worker_group=worker_group,
            rewards=Rewards(recipe.rewards, self.parts.pool),
            prompts=InTurn([each.prompt for each in asked]),
            speed=self.speeds.setdefault(plan.strategy, SpeedEstimator(round_seconds=SLICE)),
            algorithm=build(recipe.algorithm),
            budgets=dict.fromkeys(devices, budget),
        )

    async def close(self) -> None:
        """Ends the workers."""
        if self.parts is not None:
            await self.parts.close()
        await self.launcher.end()
        self.folder.cleanup()


CALL = 60.0
"""Seconds that a worker may take to be told something."""
CONTEXT = 1024
"""Tokens that a scratch model holds at least: more than the longest conversation of a workload of our own."""
PROMPTS = 10_000
"""Numbers of prompts that each step has to itself: no two steps ask the same."""


def trial_recipe(recipe: Recipe, workload: StepWorkload) -> Recipe:
    """What workers are told: the recipe's model and optimizer, the workload's step."""
    longest, model, judged = workload.lengths.cap, recipe.model, "reward" in workload.roles
    if model.name == "scratch":
        scratch = model.scratch or Scratch()
        roomy = {"context": max(scratch.context, CONTEXT), "warmup_steps": 0}  # it need not know anything
        model = model.model_copy(update={"scratch": scratch.model_copy(update=roomy)})
    return Recipe(
        seed=SEED,
        model=model,
        roles=Roles(reward_model=RoleModel(name="scratch") if judged else None),
        rewards=(*rewards_of(longest), *([ModelReward(name="model")] if judged else [])),
        algorithm=AlgorithmSection(
            name="reinforce_pp" if workload.barrier else "grpo",
            correction=Correction(kind="none"),
            kl=Kl(coef=COEF if "reference" in workload.roles else 0.0),
        ),
        batch=BatchSection(prompts=workload.prompts, samples=workload.samples, token_budget=recipe.batch.token_budget),
        engine=NativeEngineSection(max_new_tokens=longest, memory_share=recipe.engine.memory_share),
        optimizer=recipe.optimizer.model_copy(update={"lr": RATE, "schedule": "constant", "warmup": 0}),
        deadlines=recipe.deadlines,
    )


def filler(recipe: Recipe) -> str:
    """Something that is a token of its own however often it is repeated."""
    return (recipe.model.scratch or Scratch()).characters[0] if recipe.model.name == "scratch" else " a"


def prompt_of(number: int, tokens: int, renderer: Renderer, *, filler: str) -> PreparedPrompt:
    """A prompt of so many tokens, as far as the template and the tokenizer allow; no other begins like it."""

    def asked(count: int) -> PreparedPrompt:
        message = {"role": "user", "content": f"{number}:{filler * count}"}
        prompt = Prompt(id=f"trial/{number}", messages=(message,), reference="0")
        return PreparedPrompt(prompt=prompt, tokens=renderer.open([message]))

    low, high = 0, tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(asked(middle).tokens) <= tokens else (low, middle - 1)
    return asked(low)
