"""What a step would take if something were changed: the scheduler on its virtual clock, with durations that a run
measured.

`planner.simulate` forecasts steps from constants of the machine, before anything runs. Here a run has been measured:
how long decode steps, pieces of each stage and verdicts take follows from its own timeline, and the lengths of answers
from its samples. So what a change brings is the difference of two simulations that differ in nothing else.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from stretto.placement.plan import Plan
from stretto.scheduler.records import GroupStart, MoveRollouts, SpeedEstimate, StageWork, StepSpec
from stretto.scheduler.simulator import Simulation
from stretto.scheduler.speed_estimator import SHARE
from stretto.scheduler.state import StepState

OUTLIER = 3.0
"""A piece that took this many times the median per token is not fitted: something else ran, or it was the first."""

ALIKE = 0.05
"""Lanes whose numbers of answers differ by less than this share say less of what a further answer takes than noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTimes:
    """Seconds of a stage's micro-batches."""

    fixed: float
    """Of each micro-batch, whatever its size."""
    per_token: float
    """Of each token."""

    @classmethod
    def fitted(cls, pieces: Sequence[tuple[float, int]], *, budget: int) -> PieceTimes:
        """Least squares over (seconds, tokens), neither part below 0. Where pieces are of one size, or of several
        micro-batches, all is taken to be per token, which promises least of larger ones."""
        usual = median(seconds / max(1, tokens) for seconds, tokens in pieces)
        kept = [(seconds, float(tokens)) for seconds, tokens in pieces if seconds <= OUTLIER * usual * max(1, tokens)]
        mean, size = fmean(seconds for seconds, _ in kept), fmean(tokens for _, tokens in kept)
        spread = sum((tokens - size) ** 2 for _, tokens in kept)
        if spread <= (0.05 * size) ** 2 * len(kept) or max(tokens for _, tokens in kept) > budget:
            return cls(fixed=0.0, per_token=mean / max(1.0, size))
        slope = sum((tokens - size) * (seconds - mean) for seconds, tokens in kept) / spread
        slope = min(max(slope, 0.0), mean / size)
        return cls(fixed=mean - slope * size, per_token=slope)

    @classmethod
    def shared_out(cls, pieces: Sequence[tuple[float, int]], *, overhead: float, budget: int) -> PieceTimes:
        """From (seconds, tokens), where it is known which share of the seconds does not grow with the tokens."""
        seconds, tokens = sum(s for s, _ in pieces), sum(n for _, n in pieces)
        count = sum(micro_batches(n, budget) for _, n in pieces)
        return cls(fixed=overhead * seconds / count, per_token=(1.0 - overhead) * seconds / tokens)

    def seconds(self, tokens: int, budget: int) -> float:
        """Of a piece of so many tokens, in micro-batches of at most `budget`."""
        return self.fixed * micro_batches(tokens, budget) + self.per_token * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """What the newest steps of a run measured, and the setting they had."""

    plan: Plan
    """Where everything lived."""
    steps: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    """Step -> group -> (tokens of its prompt, tokens of each answer)."""
    seconds: float
    """Seconds of a step, on average."""
    tick: float
    """Seconds of a decode step of one answer."""
    tick_each: float
    """Seconds that every further answer adds to it."""
    pieces: Mapping[str, PieceTimes]
    """Stage -> seconds of its pieces."""
    verdict: float
    """Seconds of a verdict by reward functions, in one of their workers."""
    reward_workers: int
    """Worker processes of reward functions."""
    update: float
    """Seconds of the end of a step: reduction, update and publish."""
    budgets: Mapping[str, int]
    """Role -> most tokens of a piece on one device."""
    barrier: bool = False
    """True if credit needs every group."""

    @property
    def again(self) -> float:
        """Seconds of a token of context that a lane computes before it decodes."""
        return SHARE * self.pieces["train"].per_token if "train" in self.pieces else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that could be set otherwise, without another result."""

    key: str
    """What to put behind a command, such as batch.token_budget=auto."""
    what: str
    """In words."""
    apply: Callable[[MeasuredRun], MeasuredRun]
    """The run with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a change is expected to bring."""

    change: Change
    """The change."""
    seconds: float
    """Seconds of a step with it."""
    before: float
    """Seconds of a step as it is."""

    @property
    def share(self) -> float:
        """The share of a step that is saved."""
        return 1.0 - self.seconds / self.before


class MeasuredDurations:
    """How long things take on the virtual clock, as the run's own pieces, lanes and verdicts took.

    Verdicts wait for one of the reward workers, in the order in which answers end.
    """

    def __init__(self, run: MeasuredRun) -> None:
        self.run = run
        self.now: Callable[[], float] = lambda: 0.0
        self.free = [0.0] * run.reward_workers
        self.budgets = budgets_of(run)

    def tick(self, cell: str, active: int, context: float) -> float:
        """A decode step."""
        return self.run.tick + self.run.tick_each * (active - 1)

    def prefill(self, cell: str, tokens: int) -> float:
        """Prompts of groups that join a lane."""
        return self.run.again * tokens

    def piece(self, piece: StageWork) -> float:
        """A piece of any other stage; one that the run never had takes what a forward is taken to take."""
        times = self.run.pieces.get(piece.stage)
        if times is None:
            return self.run.again * piece.tokens
        return times.seconds(piece.tokens, self.budgets[piece.cell])

    def judge(self, item: tuple[int, int]) -> float:
        """A verdict, and the wait for a worker before it."""
        if not self.run.verdict:
            return 0.0
        now = self.now()
        begins = max(now, heapq.heappop(self.free))
        heapq.heappush(self.free, begins + self.run.verdict)
        return begins + self.run.verdict - now

    def switch(self, move: MoveRollouts, tokens: int) -> float:
        """Answers that go on elsewhere have their context computed there."""
        return self.run.again * tokens

    def apply(self, *, last: bool) -> float:
        """The end of a step."""
        return self.run.update if last else 0.0


def step_seconds(run: MeasuredRun) -> float:
    """Seconds of a step on the virtual clock, on average over the run's steps."""
    return fmean(_simulated(run, groups) for groups in run.steps)


def gains(run: MeasuredRun, changes: Sequence[Change]) -> list[Gain]:
    """What each change would bring, the most first. What the simulation leaves out is taken to stay as it is."""
    now = step_seconds(run)
    found = [
        Gain(change=each, seconds=max(0.0, run.seconds + step_seconds(each.apply(run)) - now), before=run.seconds)
        for each in changes
    ]
    return sorted(found, key=lambda gain: gain.seconds)


def fitted_lanes(
    lanes: Sequence[tuple[float, int, int, int]], pieces: Mapping[str, PieceTimes], *, overhead: float | None = None
) -> tuple[float, float]:
    """Seconds of a decode step of one answer, and of each further one, from lanes: (seconds, tokens of the longest
    answer, tokens of all, tokens of the prompts).

    The engine may have measured the `overhead`: the share of decoding that does not grow with the answers. Otherwise
    lanes have to tell; where they are too much alike, a further answer takes what a forward of one token takes.
    """
    again = SHARE * pieces["train"].per_token if "train" in pieces else 0.0
    if overhead is not None:
        left = [(max(0.0, s - again * context), longest, tokens) for s, longest, tokens, context in lanes]
        each = (1.0 - overhead) * median(seconds / tokens for seconds, _, tokens in left)
        return overhead * median(seconds / longest for seconds, longest, _ in left) + each, each
    rows = [(float(longest), float(tokens - longest), s - again * context) for s, longest, tokens, context in lanes]
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    xt, yt = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant > ALIKE**2 * xx * yy:
        tick, each = (yy * xt - xy * yt) / determinant, (xx * yt - xy * xt) / determinant
        if tick >= 0 and each >= 0:
            return tick, each
        if tick < 0:  # the best without what is below nothing
            return 0.0, max(0.0, yt / yy)
    each = min(again, yt / yy) if yy else 0.0
    return max(0.0, (xt - each * xy) / xx), each


def verdict_seconds(busy: float, *, answers: int, workers: int) -> float:
    """Seconds of one verdict, where functions were busy so long with so many answers: workers were all at work, or
    as many as there were answers."""
    return busy * min(workers, answers) / answers if answers else 0.0


def micro_batches(tokens: int, budget: int) -> int:
    """How many a piece of so many tokens is cut into; where a cell is alone, a piece is all that there is."""
    return max(1, -(-tokens // budget))


def budgets_of(run: MeasuredRun) -> dict[str, int]:
    """Cell -> most tokens of its micro-batches, its devices together."""
    return {
        cell.name: (cell.token_budget or run.budgets.get(cell.role, 4096)) * len(cell.devices)
        for cell in run.plan.cells
        if cell.role != "generate"
    }


def with_budget(run: MeasuredRun, tokens: int) -> MeasuredRun:
    """The run with other micro-batches."""
    cells = tuple(replace(cell, token_budget=None) for cell in run.plan.cells)
    return replace(run, plan=replace(run.plan, cells=cells), budgets=dict.fromkeys(run.budgets, tokens))


def _simulated(run: MeasuredRun, groups: Sequence[tuple[int, tuple[int, ...]]]) -> float:
    durations = MeasuredDurations(run)
    step = StepState(run.plan, _terms(run, groups))
    lengths = {(g, a): max(1, size) for g, (_, sizes) in enumerate(groups) for a, size in enumerate(sizes)}
    simulation = Simulation(step, durations, lengths)
    durations.now = lambda: simulation.now
    expected = fmean(lengths.values())
    launches = [
        GroupStart(prompt=str(index), prompt_tokens=prompt, samples=len(sizes), expected=expected)
        for index, (prompt, sizes) in enumerate(groups)
    ]
    return simulation.run(launches).seconds


def _terms(run: MeasuredRun, groups: Sequence[tuple[int, tuple[int, ...]]]) -> StepSpec:
    cells = [cell for cell in run.plan.cells if cell.role != "generate"]
    lanes = [cell.name for cell in run.plan.cells if cell.role == "generate"]
    answers = sum(len(sizes) for _, sizes in groups)
    train = run.pieces.get("train", PieceTimes(fixed=0.0, per_token=0.0))
    return StepSpec(
        groups=len(groups),
        drops=False,
        barrier=run.barrier,
        stages=tuple(dict.fromkeys(cell.role for cell in cells)),
        slots=dict.fromkeys(lanes, sys.maxsize if len(lanes) == 1 else answers),
        budgets=budgets_of(run),
        longest=max(max(sizes, default=1) for _, sizes in groups),
        speeds=SpeedEstimate(
            tick=run.tick, tick_each=run.tick_each, per_token={"train": train.per_token}, again=run.again, switch=0.05
        ),
    )
