"""Carries out what the scheduler decides, on the workers: trajectories, verdicts, scores, credit and gradients.

The scheduler (`stretto.scheduler`) knows a group by its index; here that is a prompt with its attempts. Everything is
noted once under a group or a trajectory, wherever it was made, and read in launch order, so that nothing of a step's
result follows from the plan.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stretto.engines.queue import RoutedClient
from stretto.environments.trajectory import EnvironmentBudget, RolloutStart, run_trajectory
from stretto.errors import RewardError
from stretto.rewards.base import Scores, sampled_tokens
from stretto.rewards.model_scores import reward_model_scores
from stretto.rewards.score import Scored, Verdicts, judge
from stretto.runtime import guards
from stretto.runtime.batch import StepBatch, buffered
from stretto.runtime.minibatches import ConversationKey, keyed_conversations, minibatches
from stretto.runtime.runtime import Runtime
from stretto.runtime.spans import REWARD_WORKERS, Clock
from stretto.runtime.step_credit import StepCredit
from stretto.scheduler.batch_rules import RoundRule
from stretto.scheduler.records import UPDATE, BufferedGroup, GroupStart, MoveRollouts, RolloutId, StageWork
from stretto.scheduler.speed_estimator import SpeedEstimator
from stretto.types import Group, Prompt, Sample, Trajectory, trajectory_key

STREAMS = {"reference": "reference", "value": "values"}
"""Stage -> the stream that it makes, as algorithms call it."""


class StepExecutor:
    """One step's."""

    def __init__(
        self, parts: Runtime, *, speed: SpeedEstimator, clock: Clock, step: int, carried: StepBatch | None = None
    ) -> None:
        """`carried` is what the step before has made for this one to train on."""
        self.parts, self.worker_group, self.lengths, self.speed = parts, parts.worker_group, parts.lengths, speed
        self.clock, self.step, self.carried = clock, step, carried
        self.sampling = parts.sampling(temperature=parts.recipe.engine.temperature)
        self.min_samples = parts.algorithm.min_samples
        self.asked: list[list[RolloutStart]] = []
        self.rounds = 0
        self.asking: dict[RolloutId, RoutedClient] = {}
        self.trajectories: dict[RolloutId, Trajectory] = {}
        self.active: Counter[str] = Counter()
        self.lanes: dict[str, ExitStack] = {}
        self.counts: dict[str, dict[str, int]] = {}
        # Cell -> group -> tokens that its lane did not sample but was given.
        self.contexts: dict[str, dict[int, int]] = defaultdict(dict)
        self.scored: dict[int, Scored] = {}
        self.old: dict[ConversationKey, NDArray[np.float64]] = dict(carried.old if carried else {})
        self.model_scores: dict[RolloutId, asyncio.Future[float | None]] = defaultdict(
            asyncio.get_running_loop().create_future
        )
        self.credit = StepCredit(parts)
        self.trained: dict[ConversationKey, NDArray[np.float32]] = {}
        self.reports: list[dict[str, float]] = []
        self.suspects: tuple[ConversationKey, ...] = ()
        self.verdicts: dict[RolloutId, asyncio.Future[Verdicts]] = defaultdict(asyncio.get_running_loop().create_future)
        # How many reward functions run, on trajectories of which groups since when none did, and the span of that.
        self.judging, self.judged, self.judges = 0, set[int](), ExitStack()
        self.judged_all: asyncio.Handle | None = None
        for index, group in enumerate(carried.accepted if carried else ()):
            self.asked.append(
                [RolloutStart(prompt=t.prompt, visit=t.visit, attempt=t.attempt) for t in group.trajectories]
            )
            self.trajectories |= {(index, trajectory.attempt): trajectory for trajectory in group.trajectories}
            self.scored[index] = Scored(groups=(group,), failed=())
        self.first = len(self.asked)

    # Launches ---------------------------------------------------------------------------------------------------------

    @property
    def rule(self) -> RoundRule:
        """How many groups each round launches."""
        batch, drops = self.parts.recipe.batch, self.parts.algorithm.drops
        return RoundRule(groups=batch.prompts, oversample=batch.oversample, most=batch.max_rounds if drops else 1)

    def draw(self, count: int) -> list[GroupStart]:
        """The next prompts, with how long their answers are expected to be."""
        self.rounds += 1
        batch, found = self.parts.recipe.batch, list[GroupStart]()
        for prompt, visit in self.parts.prompts.take(count):
            attempts = range(batch.samples)
            self.asked.append([RolloutStart(prompt=prompt, visit=visit, attempt=attempt) for attempt in attempts])
            found.append(self._asked(prompt, len(attempts)))
        return found

    def _asked(self, prompt: Prompt, samples: int) -> GroupStart:
        """A group as the scheduler sees it."""
        context = self.parts.renderer.open([dict(message) for message in prompt.messages])
        expected = self.lengths.expected(prompt.id)
        return GroupStart(prompt=prompt.id, prompt_tokens=len(context), samples=samples, expected=expected)

    def carry(self) -> list[BufferedGroup]:
        """What is carried into the step, as the scheduler sees it."""
        return [buffered(group) for group in (self.carried.accepted if self.carried else ())]

    def more(self, missing: int) -> Sequence[GroupStart]:
        """Another round, while the recipe allows one."""
        count = self.rule.again(missing, rounds=self.rounds)
        return self.draw(count) if count else ()

    # Trajectories -----------------------------------------------------------------------------------------------------

    async def generate(self, item: RolloutId, cell: str) -> int:
        """Runs a trajectory; returns its sampled tokens, 0 if it failed."""
        before, asking = self.asking.get(item), RoutedClient(self.worker_group.lanes, cell)
        self.asking[item] = asking
        self._busy(cell, +1)
        try:
            if before is not None:  # a death has cut it off, and its environment may still be tidying up
                await before.over.wait()
            return await self._generate(item, asking)
        finally:
            asking.over.set()
            self._busy(asking.cell, -1)

    def _busy(self, cell: str, more: int) -> None:
        """Notes when a lane opens and closes."""
        self.active[cell] += more
        self.worker_group.lanes[cell].running += more
        if more > 0 and self.active[cell] == more:
            self.lanes[cell] = ExitStack()
            piece = self.clock.piece("generate", cell, step=self.step, version=self.worker_group.version)
            self.counts[cell] = self.lanes[cell].enter_context(piece)
        if not self.active[cell]:
            self.lanes.pop(cell).close()
            counts, context = self.counts[cell], sum(self.contexts.pop(cell, {}).values())
            if "tokens" in counts:
                longest, tokens, seconds = counts["longest"], counts["tokens"], self.clock.spans[-1].seconds
                self.speed.lane(seconds=seconds, longest=longest, tokens=tokens, context=context, cell=cell)

    async def _generate(self, item: RolloutId, asking: RoutedClient) -> int:
        deadline = self.parts.recipe.environment.deadline
        trajectory = await run_trajectory(
            self.asked[item[0]][item[1]],
            model=asking,
            environment=self.parts.environment,
            renderer=self.parts.renderer,
            sampling=self.sampling,
            outside=EnvironmentBudget(deadline, self.worker_group.lanes[asking.cell].whereabouts),
            addresses=self.parts.addresses,
        )
        self.trajectories[item] = trajectory
        tokens = sampled_tokens(trajectory)
        given = sum(len(conversation.tokens) for conversation in trajectory.conversations) - tokens
        self.contexts[asking.cell][item[0]] = given  # of siblings once: their prompt is computed once
        counts = self.counts[asking.cell]
        counts["tokens"] = counts.get("tokens", 0) + tokens
        counts["longest"] = max(counts.get("longest", 0), tokens)
        return 0 if trajectory.failure else tokens

    def move(self, move: MoveRollouts) -> None:
        """Lets trajectories go on elsewhere."""
        for item in move.items:
            asking = self.asking[item]
            self.worker_group.lanes[asking.cell].move(asking.waits, self.worker_group.lanes[move.target])
            self._busy(move.target, +1)
            self._busy(asking.cell, -1)
            asking.cell = move.target

    async def judge(self, item: RolloutId) -> None:
        """Lets reward functions run on a trajectory, also while others of its group are generated."""
        with self._judging(item[0]):
            verdicts = await judge(self.trajectories[item], self.parts.rewards)
        if not (verdict := self.verdicts[item]).done():
            verdict.set_result(verdicts)

    async def verdict(self, index: int) -> Sequence[int]:
        """Judges a group; returns the attempts to train on."""
        items = [(index, attempt) for attempt in range(len(self.asked[index]))]
        scored = self.scored[index] = await self.parts.score(
            [self.trajectories[item] for item in items],
            min_samples=self.min_samples,
            ask=partial(self._rated, index),
            begun=[self.verdicts[item] for item in items],
        )
        if self.drop(index):
            return ()
        return [trajectory.attempt for trajectory in scored.groups[0].trajectories]

    @contextmanager
    def _judging(self, index: int) -> Iterator[None]:
        """Notes when reward functions run, those of several trajectories together, and of all that ended at once."""
        if self.judged_all is not None:
            self.judged_all.cancel()
            self.judged_all = None
        elif not self.judging:
            self.judged.clear()
            piece = self.clock.piece("reward", REWARD_WORKERS, step=self.step, version=self.worker_group.version)
            self.counts[REWARD_WORKERS] = self.judges.enter_context(piece)
        self.judging += 1
        self.judged.add(index)
        self.counts[REWARD_WORKERS]["groups"] = len(self.judged)
        try:
            yield
        finally:
            self.judging -= 1
            if not self.judging:  # others may begin in this very turn of the loop
                self.judged_all = asyncio.get_running_loop().call_soon(self._close_judges)

    def _close_judges(self) -> None:
        self.judged_all = None
        self.judges.close()

    async def _rated(self, index: int, trajectories: Sequence[Trajectory]) -> Scores:
        """What the reward model says of a group, once the pieces with it are done."""
        sampled = [each for each in trajectories if sampled_tokens(each)]
        scores = {trajectory_key(each): await self.model_scores[index, each.attempt] for each in sampled}
        return {key: score for key, score in scores.items() if score is not None}

    # Pieces -----------------------------------------------------------------------------------------------------------

    async def piece(self, piece: StageWork) -> None:
        """Scores or trains."""
        with self.clock.piece(piece.stage, piece.cell, step=self.step, version=self.worker_group.version) as counts:
            counts["groups"], counts["tokens"] = len({index for index, _ in piece.items}), piece.tokens
            await self._piece(piece)
        self.speed.piece(piece.stage, seconds=self.clock.spans[-1].seconds, tokens=piece.tokens, cell=piece.cell)

    async def _piece(self, piece: StageWork) -> None:
        trajectories = [self.trajectories[item] for item in piece.items]
        if piece.stage == "reward":
            scores = await reward_model_scores(trajectories, measure=partial(self.worker_group.score, piece.cell))
            for item, trajectory in zip(piece.items, trajectories, strict=True):
                asked = self.model_scores[item[0], trajectory.attempt]
                if not asked.done():  # the cell may have died between this and the scheduler's hearing of it
                    asked.set_result(scores.get(trajectory_key(trajectory)))
            return
        if piece.stage in STREAMS or piece.stage == "old":
            keyed = keyed_conversations(trajectories)
            if piece.stage == "reference" and (teacher := self.parts.teacher_prompt) is not None:
                keyed = teacher.asked_all(trajectories, keyed)
            found = await self.worker_group.score(piece.cell, [conversation for _, conversation in keyed])
            told = {key: numbers for (key, _), numbers in zip(keyed, found, strict=True)}
            if piece.stage == "old":
                self.old.update(told)
            else:
                self.credit.note(STREAMS[piece.stage], told)
            return
        samples = [sample for item in piece.items for sample in self._credited(item)]
        if self.old:
            samples = [replace(sample, old=self.old.get(sample.key)) for sample in samples]
        # What the first epoch found is what the weights that sampled say, or the nearest to it.
        self.trained = {**await self.worker_group.accumulate(piece.cell, samples), **self.trained}

    def _credited(self, item: RolloutId) -> list[Sample]:
        """A trajectory's samples; its group is credited the first time, or with all others if credit needs them."""
        index, attempt = item
        samples = self.credit.of(index, lambda each: self.scored[each].groups[0], self._trained)
        return [sample for sample in samples if sample.key[2] == attempt]

    def _trained(self) -> list[int]:
        """Every judged group that is trained on, in launch order; where more were launched, the first that do."""
        if self.carried:
            return [index for index in range(self.first) if not self.drop(index)]
        return [index for index in sorted(self.scored) if not self.drop(index)][: self.parts.recipe.batch.prompts]

    def drop(self, index: int) -> bool:
        """True if a judged group is not trained on."""
        groups = self.scored[index].groups
        return not groups or self.parts.algorithm.drop(groups[0])

    async def divide(self, groups: Sequence[int]) -> list[list[RolloutId]]:
        """The trajectories of each update, as on one device; those in which nothing was sampled are trained nowhere."""
        self._judge_step()
        items = {
            trajectory_key(trajectory): (index, trajectory.attempt)
            for index in groups
            for trajectory in self.scored[index].groups[0].trajectories
        }
        samples = [sample for item in items.values() for sample in self._credited(item)]
        parts = minibatches(samples, self.parts.recipe, step=self.step)
        divided = [list(dict.fromkeys(items[sample.key[:3]] for sample in part)) for part in parts]
        return [[item for item in part if sampled_tokens(self.trajectories[item])] for part in divided]

    def _judge_step(self) -> None:
        """Stops before anything is updated if too much could not be judged."""
        launched = sum(map(len, self.asked[self.first :]))
        scored = self.all_scored()
        try:
            guards.reward_errors(self.parts.recipe.guards, scored, launched=launched)
        except RewardError as error:
            asked = len(self.asked) - self.first
            error.batch = StepBatch(scored=scored, accepted=(), samples=(), launched=asked, rounds=self.rounds)
            raise

    async def apply(self, groups: Sequence[int], *, last: bool) -> None:
        """An update. A step that only fills the pipe has none."""
        if self.parts.recipe.batch.updates_a_step == 1:
            self._judge_step()
        if not self.carried and self.parts.plan.staleness:
            return
        with ExitStack() as spans:
            for cell in self.parts.plan.cells:
                if cell.role in UPDATE:
                    span = self.clock.piece("publish", cell.name, step=self.step, version=self.worker_group.version)
                    spans.enter_context(span)
            report = await self.worker_group.apply(last=last)
        self.reports.append({**report.metrics, "updates/skipped": float(not report.applied)})
        self.suspects = report.suspects
        if not last:
            guards.finite(self.parts.recipe.guards, self.reports[-1], step=self.step, suspects=self.suspects)

    async def restart_worker(self, device: str) -> None:
        """Brings back a device's process that died."""
        await self.worker_group.recovery.restart_worker(device)

    # What came of it --------------------------------------------------------------------------------------------------

    def expect_lengths(self) -> None:
        """Lets later steps expect what this one has seen, in launch order: an interrupted step leaves no trace."""
        for (index, _), trajectory in sorted(self.trajectories.items()):
            if index >= self.first:
                self.lengths.observe(trajectory.prompt.id, sampled_tokens(trajectory))
        self.lengths.decay()

    def made(self, accepted: Sequence[int]) -> StepBatch:
        """What was launched in this step, with the credit of what it has trained on."""
        return StepBatch(
            scored=self.all_scored(),
            accepted=tuple(self.scored[index].groups[0] for index in accepted),
            samples=self.credit.together(accepted),
            launched=len(self.asked) - self.first,
            rounds=self.rounds,
            trained=self.trained,
            old={key: numbers for key, numbers in self.old.items() if self.carried and key not in self.carried.old},
        )

    def learned(self, made: StepBatch) -> StepBatch:
        """What this step has trained on: what was carried into it, or what it has made."""
        if not self.carried:
            return made
        return replace(self.carried, samples=self.credit.together(range(self.first)), trained=self.trained)

    def all_scored(self) -> Scored:
        """Every trajectory that was launched in this step, judged or failed, in launch order."""
        scored = [self.scored[index] for index in range(self.first, len(self.asked))]
        groups: tuple[Group, ...] = tuple(group for each in scored for group in each.groups)
        return Scored(groups=groups, failed=tuple(each for one in scored for each in one.failed))
