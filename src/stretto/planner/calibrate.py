"""The constants of the cost model from steps that were taken: least squares over the functions that price plans.

A step that was taken comes with the scheduler's notes: which answers ran on which lane, which trajectories made up each
piece, and when. So what is compared is span by span, under the very plan that ran: the seconds of a lane, of a stage
on a cell, and of everything else. Nothing is fitted per workload; the constants are those of `placement.rates`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stretto.placement.plan import Plan
from stretto.placement.rates import MOST_LONE, Rates
from stretto.planner.candidate import Candidate
from stretto.planner.cost.decode_time import decode
from stretto.planner.cost.stage_times import PlanDurations, StageTimes
from stretto.planner.lone_devices import Span, lone_shares
from stretto.planner.problem import PlanningProblem
from stretto.scheduler.asyncio_driver import EventLog
from stretto.scheduler.records import ApplyUpdate, MoveRollouts, RolloutId, StageWork, StartRollouts

CONSTANTS = (
    "matmul_share", "attention_share", "layer_passes", "backward", "decode_share", "tick", "tick_layer", "plain_layer",
    "tick_request", "piece", "phase", "far_delay", "gather", "lone",
)  # fmt: skip
"""What is fitted: rates of products, attention and bytes, what a backward takes of them, what decode steps, requests,
pieces and changes of phase cost however small they are, publishing, and what a device saves that works alone."""
HOLD = 0.02
"""How much a constant is held to where it began, in shares of a step per factor of e: what no span depends on stays."""
LEAST = 1e-6
"""What a constant that is 0 begins with."""
ROUNDS = 25
"""Steps of the fit, at most."""
NUDGE = 1e-3
"""By which a logarithm is changed to see what follows."""
FACTOR = 3.0
"""Most by which logarithms change in a step of the fit: a factor of e to this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One step that was taken."""

    setting: PlanningProblem
    """What was asked for, with the lengths that answers had."""
    choice: Candidate
    """How it was done."""
    plan: Plan
    """The same as a plan; its cells have the names that the notes have."""
    seconds: float
    """How long it took."""
    notes: EventLog
    """What the scheduler was told and what it offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSeconds:
    """Some of a step's seconds, measured, and how they are predicted."""

    name: str
    """generate, a stage, or rest."""
    seconds: float
    """Measured."""
    predicted: Callable[[PlanDurations], float]
    """From the durations of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFit:
    """What came of a fit."""

    rates: Mapping[str, float]
    """The constants by name."""
    before: float
    """Median relative error of the parts' seconds with the constants that it began with."""
    after: float
    """The same with the fitted ones."""


def fit(steps: Sequence[MeasuredStep], rates: Rates) -> CalibrationFit:
    """The constants that explain the steps best, beginning with these; a damped Gauss-Newton on their logarithms."""
    known = [_known(seen) for seen in steps]
    start = np.log([max(getattr(rates, name), LEAST) for name in CONSTANTS])

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        found = _errors(known, _with(rates, logs))
        return np.concatenate([found, HOLD * (logs - start)])

    logs, damping = start, 1e-3
    now = residuals(logs)
    for _ in range(ROUNDS):
        slopes = np.stack([(residuals(logs + nudge) - now) / NUDGE for nudge in NUDGE * np.eye(len(logs))], axis=1)
        square = slopes.T @ slopes
        move = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ now).clip(-FACTOR, FACTOR)
        then = residuals(logs + move)
        if then @ then < now @ now:
            settled = np.abs(move).max() < NUDGE
            logs, now, damping = logs + move, then, damping / 3
            if settled:
                break
        else:
            damping *= 5
    fitted = _with(rates, logs)
    return CalibrationFit(
        rates={name: float(getattr(fitted, name)) for name in CONSTANTS},
        before=_median(known, rates),
        after=_median(known, fitted),
    )


def _known(seen: MeasuredStep) -> tuple[MeasuredStep, Sequence[MeasuredSeconds], Mapping[str, float]]:
    notes = StepNotes.of(seen.notes)
    return seen, list(parts(seen, notes)), lone_shares(notes.spans, seen.plan, seen.setting.cluster.devices)


def _with(rates: Rates, logs: NDArray[np.float64]) -> Rates:
    found = dict(zip(CONSTANTS, np.exp(logs).tolist(), strict=True))
    return replace(rates, **found | {"lone": min(found["lone"], MOST_LONE) if rates.lone else 0.0})  # GPUs have none


Known = Sequence[tuple[MeasuredStep, Sequence[MeasuredSeconds], Mapping[str, float]]]
"""A step, its parts, and how much of its work each cell did alone on its host."""


def _pairs(known: Known, rates: Rates) -> Iterator[tuple[MeasuredStep, float, float]]:
    """(step, measured, predicted) of every part."""
    for seen, of_it, lone in known:
        setting = replace(seen.setting, costs=replace(seen.setting.costs, rates=rates))
        priced = PlanDurations(StageTimes(setting), seen.choice, seen.plan, lone)
        for part in of_it:
            yield seen, part.seconds, part.predicted(priced)


def _errors(known: Known, rates: Rates) -> NDArray[np.float64]:
    """What is wrong with every part, as a share of its step; what is far off counts by its root, as outliers do."""
    wrong = np.array([(said - was) / seen.seconds for seen, was, said in _pairs(known, rates)])
    return np.asarray(np.sign(wrong) * (np.sqrt(1 + np.abs(wrong) / TOLERATED) - 1) * 2 * TOLERATED)


TOLERATED = 0.1
"""Errors of this share of a step begin to count less: a machine is sometimes busy with something else."""


def _median(known: Known, rates: Rates) -> float:
    return float(np.median([abs(said / was - 1) for _, was, said in _pairs(known, rates) if was > 0]))


# The parts of a step ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepNotes:
    """What the scheduler has noted of a step, in order."""

    begun: dict[int, float] = field(default_factory=dict)
    """Piece -> when it began."""
    done: dict[int, float] = field(default_factory=dict)
    """Piece -> when it was done."""
    pieces: defaultdict[tuple[str, str], list[StageWork]] = field(default_factory=lambda: defaultdict(list))
    """(cell, stage) -> its pieces."""
    lanes: defaultdict[str, list[RolloutId]] = field(default_factory=lambda: defaultdict(list))
    """Cell -> the answers that began on it."""
    first: dict[str, float] = field(default_factory=dict)
    """Cell -> when the first of them began."""
    last: dict[RolloutId, float] = field(default_factory=dict)
    """Answer -> when it ended."""
    applied: list[float] = field(default_factory=list)
    """When updates began."""
    stays: defaultdict[RolloutId, list[tuple[str, float]]] = field(default_factory=lambda: defaultdict(list))
    """Answer -> the cells that it was generated on, and since when."""

    @classmethod
    def of(cls, notes: EventLog) -> StepNotes:
        """Those of a step."""
        found = cls()
        for _, now, works in notes.offers:
            for work in works:
                match work:
                    case StartRollouts():
                        found.lanes[work.cell] += work.items
                        found.first.setdefault(work.cell, now)
                        found.stay(work.items, work.cell, now)
                    case MoveRollouts():
                        found.stay(work.items, work.target, now)
                    case StageWork():
                        found.pieces[work.cell, work.stage].append(work)
                        found.begun[work.number] = now
                    case ApplyUpdate():
                        found.applied.append(now)
        for told in notes.told:
            if told.what == "done":
                found.done[told.arguments[0].number] = told.at
            elif told.what == "ended":
                found.last[told.arguments[0]] = told.at
        return found

    def stay(self, items: Sequence[RolloutId], cell: str, now: float) -> None:
        """Answers begin or go on on a cell."""
        for item in items:
            self.stays[item].append((cell, now))

    @property
    def moved(self) -> bool:
        """True if some answer went on elsewhere."""
        return any(len(found) > 1 for found in self.stays.values())

    @property
    def spans(self) -> list[Span]:
        """What every cell did, and when."""
        spans = [
            (cell, since, left)
            for item, found in self.stays.items()
            for (cell, since), (_, left) in pairwise([*found, ("", self.last[item])])
        ]
        pieces = [piece for found in self.pieces.values() for piece in found]
        return spans + [(piece.cell, self.begun[piece.number], self.done[piece.number]) for piece in pieces]


def parts(seen: MeasuredStep, notes: StepNotes) -> Iterator[MeasuredSeconds]:
    """Every lane, every stage on a cell, and the rest: the end of the step, and what lies between phases."""
    if not notes.moved:
        for cell, items in notes.lanes.items():
            took = max(notes.last[item] for item in items) - notes.first[cell]
            yield MeasuredSeconds(name="generate", seconds=took, predicted=_lane(cell, items))
    for (_, stage), found in notes.pieces.items():
        took = math.fsum(notes.done[piece.number] - notes.begun[piece.number] for piece in found)
        yield MeasuredSeconds(name=stage, seconds=took, predicted=_stage(found))
    rest = seen.seconds - ((notes.applied[-1] if notes.applied else 0.0) - seen.notes.offers[0][1])
    if seen.plan.flow == "phased":
        rest += _between(notes)
    yield MeasuredSeconds(name="rest", seconds=rest, predicted=lambda priced: priced.ending.seconds)


def _between(notes: StepNotes) -> float:
    """Seconds between phases in which nothing ran: verdicts, credit, whatever waits for something."""
    edges = [(max(notes.last.values()), max(notes.last.values()))]
    stages = dict.fromkeys(stage for _, stage in notes.pieces)
    for stage in stages:
        numbers = [piece.number for (_, other), found in notes.pieces.items() if other == stage for piece in found]
        edges.append((min(notes.begun[number] for number in numbers), max(notes.done[number] for number in numbers)))
    edges.sort()
    return math.fsum(max(0.0, then - end) for (_, end), (then, _) in pairwise(edges))


def _lane(cell: str, items: Sequence[RolloutId]) -> Callable[[PlanDurations], float]:
    """Answers that begin together on a cell."""
    groups = len({index for index, _ in items})

    def predicted(priced: PlanDurations) -> float:
        lengths = [priced.lengths[index][attempt] for index, attempt in items]
        return decode(
            lengths,
            priced.work.prompt,
            lambda batch, context: priced.tick(cell, int(batch), context),
            slots=len(lengths),
            pool=math.inf,
            prefill=lambda tokens: priced.prefill(cell, groups * priced.work.prompt),
        ).seconds

    return predicted


def _stage(pieces: Sequence[StageWork]) -> Callable[[PlanDurations], float]:
    return lambda priced: math.fsum(map(priced.piece, pieces))
