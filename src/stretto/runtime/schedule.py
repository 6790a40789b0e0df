"""A step as the scheduler sees it, and the calls that let it run: for training, and for answers outside of a step.

The scheduler decides, `runtime.executor` carries out. Evaluations and tables of V* go the same way as steps, without
training: on one device and on several, judged as soon as a group has ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from stretto.engines.queue import SLICE
from stretto.environments.chat import Sampling
from stretto.environments.trajectory import RolloutStart
from stretto.errors import StateLostError
from stretto.placement.plan import Cell, Plan
from stretto.rewards.score import Scored
from stretto.runtime.batch import StepBatch
from stretto.runtime.executor import StepExecutor
from stretto.runtime.interrupt import unbroken
from stretto.runtime.minibatches import merged
from stretto.runtime.runtime import Runtime
from stretto.runtime.spans import Clock
from stretto.runtime.stale_batch import BufferedBatch
from stretto.runtime.training_data import batch_of
from stretto.scheduler.asyncio_driver import Driver, EventLog
from stretto.scheduler.records import GroupStart, RolloutId, SpeedEstimate, StepSpec
from stretto.scheduler.speed_estimator import SpeedEstimator
from stretto.scheduler.state import StepState


def slots_of(tokens: int, drawn: Sequence[GroupStart], *, longest: int) -> int:
    """Trajectories that a cache of so many tokens is sure to hold at once: a group's prompt stands there once.

    What a cell is given beyond that would wait in its engine, where no cell that is done sooner could take it over.
    """
    most = max((asked.prompt_tokens / asked.samples for asked in drawn), default=0.0)
    return max(1, int(tokens / (longest + most)))


def _slots(parts: Runtime, plan: Plan, cell: Cell, drawn: Sequence[GroupStart]) -> int:
    """Trajectories that a cell is given at once. One that is alone gets all, as its engine knows best when to begin
    which: then that follows from counts."""
    if sum(each.role == "generate" for each in plan.cells) == 1:
        return sys.maxsize
    tokens = parts.rooms[cell.devices[0]] * cell.row_ranks  # each team of a lane has a cache of its own
    return slots_of(tokens, drawn, longest=parts.recipe.engine.max_new_tokens)


def terms_of(parts: Runtime, speeds: SpeedEstimate, drawn: Sequence[GroupStart]) -> StepSpec:
    """What holds for a step that begins with these prompts."""
    recipe, algorithm = parts.recipe, parts.algorithm
    divides = recipe.batch.updates_a_step > 1
    terms = _sampling_terms(parts, parts.plan, speeds, drawn)
    return replace(
        terms,
        groups=recipe.batch.prompts,
        drops=algorithm.drops,
        barrier=algorithm.scope == "batch" and not parts.whitens,
        stages=(*terms.stages, *["old"] * divides),
        divides=divides,
    )


def _sampling_terms(parts: Runtime, plan: Plan, speeds: SpeedEstimate, drawn: Sequence[GroupStart]) -> StepSpec:
    """What holds where every group counts, whatever its rewards."""
    cells = [cell for cell in plan.cells if cell.role != "generate"]
    return StepSpec(
        groups=len(drawn),
        drops=False,
        barrier=False,
        stages=tuple(dict.fromkeys(cell.role for cell in cells)),
        slots={cell.name: _slots(parts, plan, cell, drawn) for cell in plan.cells if cell.role == "generate"},
        # The devices of a cell share the rows of a piece.
        budgets={cell.name: (cell.token_budget or parts.budgets[cell.devices[0]]) * cell.row_ranks for cell in cells},
        longest=parts.recipe.engine.max_new_tokens,
        speeds=speeds,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A step that was taken."""

    batch: StepBatch
    """What it learned from."""
    updates: Sequence[Mapping[str, float]]
    """The trainer's numbers of each update; of the last one the weights may have turned out to be no numbers."""
    suspects: tuple[tuple[str, int, int, int], ...] = ()
    """Samples that made the last one not finite."""

    @property
    def report(self) -> dict[str, float]:
        """The reports of all updates as one line."""
        return merged(self.updates)


async def run_step(parts: Runtime, clock: Clock, *, step: int) -> StepResult:
    """One step under its deadline; Ctrl-C ends it only before its first update."""
    with clock.watch.stage("step", step, clock.last):
        return await unbroken(take_step(parts, clock, step=step), once=parts.worker_group.updates.begun)


async def take_step(
    parts: Runtime, clock: Clock, *, step: int, noted: Callable[[EventLog], object] | None = None
) -> StepResult:
    """One step: what it learned from, and the numbers of its updates. `noted` is given what the scheduler was told.

    Where samplers may lag behind, a step trains on what the one before has made, and makes what the next one trains
    on. The first fills the pipe before, and the last makes nothing. Where rows are learned from, a step makes nothing.
    """
    if parts.data is not None:
        rows = await batch_of(parts, parts.data)
        executor, made = await turn(parts, clock, step=step, carried=rows, launches=False, noted=noted)
        parts.worker_group.applying = False
        return StepResult(batch=executor.learned(made), updates=executor.reports, suspects=executor.suspects)
    lags, ends, waiting = parts.plan.staleness > 0, step == parts.recipe.run.steps, parts.ahead.waiting
    if lags and waiting is None:
        cursor = parts.prompts.state()
        _, filled = await turn(parts, clock, step=step)
        waiting = BufferedBatch(batch=filled, cursor=cursor)
    cursor = parts.prompts.state()
    carried = waiting.batch if waiting else None
    executor, made = await turn(parts, clock, step=step, carried=carried, launches=not (lags and ends), noted=noted)
    parts.ahead.waiting = BufferedBatch(batch=made, cursor=cursor) if lags and not ends else None
    parts.worker_group.applying = False
    result = StepResult(batch=executor.learned(made), updates=executor.reports, suspects=executor.suspects)
    if parts.kl is None:
        return result
    coef, trajectories = parts.kl.coef, len({sample.key[:3] for sample in result.batch.samples})
    if result.report["tokens/trained"]:  # a critic alone says nothing of the policy
        parts.kl.observe(result.report["kl/reference"], trajectories)
    return replace(result, updates=[{**report, "kl/coef": coef} for report in result.updates])


async def turn(
    parts: Runtime,
    clock: Clock,
    *,
    step: int,
    carried: StepBatch | None = None,
    launches: bool = True,
    noted: Callable[[EventLog], object] | None = None,
) -> tuple[StepExecutor, StepBatch]:
    """What the scheduler calls a step, from the first launch to the update; returns what it made, too."""
    executor = StepExecutor(parts, speed=parts.speed, clock=clock, step=step, carried=carried)
    drawn = executor.draw(executor.rule.first) if launches else []
    terms = terms_of(parts, parts.speed.speeds(), drawn)
    if (critic := parts.recipe.roles.critic) and step <= critic.warmup_steps:
        terms = replace(terms, stages=tuple(stage for stage in terms.stages if stage != "train"))
    if parts.plan.staleness and carried:  # what fills the pipe is trained on by the weights that sampled it
        terms = replace(terms, stages=(*terms.stages, "old"))
    state = StepState(parts.plan, terms, spread=parts.lengths.spread)
    await parts.worker_group.recovery.retry_after_worker_loss(parts.worker_group.begin)
    notes = await Driver(state, executor, now=time.monotonic).run(drawn, executor.carry())
    if noted is not None:
        noted(notes)
    executor.expect_lengths()
    shares = parts.worker_group.decoding.by_device()
    generating = (cell for cell in parts.plan.cells if cell.role == "generate")
    parts.speed.decoded({cell.name: shares[cell.devices[0]] for cell in generating if cell.devices[0] in shares})
    parts.speed.decay()
    return executor, executor.made(state.accepted)


class SampleExecutor(StepExecutor):
    """Carries out what is asked outside of a step: answers and verdicts, of which nobody learns anything."""

    def __init__(
        self, parts: Runtime, groups: Sequence[Sequence[RolloutStart]], sampling: Sampling, *, judged: bool = True
    ) -> None:
        """Answers that are not `judged` are left without a verdict."""
        speed = SpeedEstimator(round_seconds=SLICE)
        super().__init__(parts, speed=speed, clock=Clock(devices=parts.devices), step=0)
        self.sampling, self.min_samples, self.wants_verdicts = sampling, 1, judged
        self.asked = [list(group) for group in groups]

    def drawn(self) -> list[GroupStart]:
        """The groups as the scheduler sees them."""
        return [self._asked(group[0].prompt, len(group)) for group in self.asked]

    def more(self, missing: int) -> Sequence[GroupStart]:
        """What has no verdict is not made up for."""
        return ()

    async def judge(self, item: RolloutId) -> None:
        """Judges an answer as in a step, where verdicts are wanted."""
        if self.wants_verdicts:
            await super().judge(item)

    async def verdict(self, index: int) -> Sequence[int]:
        """The verdict as in a step, or none."""
        if self.wants_verdicts:
            return await super().verdict(index)
        attempts = tuple(self.trajectories[index, attempt] for attempt in range(len(self.asked[index])))
        self.scored[index] = Scored(groups=(), failed=attempts)
        return ()

    def drop(self, index: int) -> bool:
        """Every group that has verdicts counts."""
        return not self.scored[index].groups

    async def apply(self, groups: Sequence[int], *, last: bool) -> None:
        """There is nothing to update."""

    async def restart_worker(self, device: str) -> None:
        """Where nobody trains there is nobody to bring it back from, and whoever asked has lost little."""
        if not self.worker_group.copies:
            raise StateLostError(f"{device}: its process has died")
        await super().restart_worker(device)


async def sample(
    parts: Runtime,
    launches: Sequence[RolloutStart],
    *,
    temperature: float,
    seed: int | None = None,
    judged: bool = True,
) -> Scored:
    """Answers outside of a step, with the recipe's noise or that of another `seed`, and their verdicts if they are to
    be `judged`."""
    sampling = parts.sampling(temperature=temperature, seed=seed)
    groups = [list(group) for _, group in groupby(launches, key=lambda each: (each.prompt.id, each.visit))]
    executor = SampleExecutor(parts, groups, sampling, judged=judged)
    plan = parts.plan.only({"generate", "reward"} if judged else {"generate"})
    drawn = executor.drawn()
    if not drawn:
        return Scored(groups=(), failed=())
    state = StepState(plan, _sampling_terms(parts, plan, parts.speed.speeds(), drawn), spread=parts.lengths.spread)
    await Driver(state, executor, now=time.monotonic).run(drawn)
    return executor.all_scored()
