"""A step under a choice on the virtual clock: the scheduler that executes plans, with the cost model as its cells.

Lengths and verdicts, and so the rounds of dynamic sampling, are drawn once per workload, the same for every choice. A
lane takes as many answers at a time as its caches hold; where the drawn lengths would have overrun them, the step is
simulated again with fewer, so that no forecast rests on memory that is not there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from stretto.placement.plan import Plan
from stretto.placement.transport import TensorPath
from stretto.planner.candidate import Candidate
from stretto.planner.cost.memory import RankMemory
from stretto.planner.cost.memory_fit import GroupMemory, MemoryFit
from stretto.planner.cost.stage_times import PlanDurations, StageTimes, typical
from stretto.planner.cost.step_end import StepEnd
from stretto.planner.lone_devices import lone_shares
from stretto.planner.problem import PlanningProblem
from stretto.scheduler.batch_rules import shuffled_parts
from stretto.scheduler.records import BufferedGroup, GroupStart, RolloutId, SpeedEstimate, StepSpec, role_of
from stretto.scheduler.simulator import BusySpan, Simulated, Simulation
from stretto.scheduler.state import StepState

TRIES = 5
"""Numbers of answers at a time that are tried before one that cannot fail."""
FEWER = 0.9
"""Of the answers that would have had room if all had held as much: the fewer there are, the more of them are long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a step is expected to be."""

    choice: Candidate
    """What was simulated."""
    plan: Plan
    """The candidate's plan."""
    room: MemoryFit
    """The candidate's memory."""
    setting: PlanningProblem = field(repr=False, compare=False)
    """What was asked, with the devices in the order in which the plan uses them."""
    step: float
    """Seconds of a step; with staleness 1, of one that is neither the first nor the last."""
    stages: Mapping[str, float]
    """Stage -> seconds on the cells that serve it, averaged over them; they add up to more where stages overlap."""
    ending: StepEnd
    """What follows when everything is accumulated."""
    idle: float
    """Share of the devices' seconds without work."""
    workless: int
    """Devices of the plan that never had any."""
    tokens: int
    """Tokens that were generated."""
    slots: int
    """Answers that a lane generates at a time, at most."""
    cached: float
    """Most tokens that a lane's caches held."""
    stretches: tuple[BusySpan, ...]
    """What each cell did."""
    updates: tuple[tuple[float, float], ...]
    """When each update began and ended, the last one with what follows it."""
    rounds: int
    """How often groups were launched."""
    launched: int
    """How many of them."""
    gradients: TensorPath
    """How cells that train add up their gradients."""
    weights: TensorPath
    """How new weights get to those that generate."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the devices, as the sides of its memory count them."""
        return self.setting.names

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of a step."""
        return self.tokens / self.step

    def held(self, room: GroupMemory) -> tuple[str, RankMemory]:
        """The phase in which a device of this side holds most, and what; with the caches that were needed."""
        phases = dict(room.phases)
        if "generate" in phases:
            phases["generate"] += RankMemory(cache=self.cached * room.token / self.choice.lane.mesh.dp)
        phase = max(phases, key=lambda name: phases[name].total)
        return phase, phases[phase]


def simulate(prices: StageTimes, choice: Candidate, room: MemoryFit) -> Forecast:
    """The forecast of a choice that fits."""
    work = prices.setting.workload
    plan = choice.plan(prices.setting, share=room.share)
    durations = PlanDurations(prices, choice, plan)
    lanes = sum(cell.role == "generate" for cell in plan.cells)
    slots, took = _within(prices, choice, plan, durations, room.pool)
    if prices.costs.rates.lone:
        spans = [(each.cell, each.start, each.stop) for each in took.stretches]
        durations = PlanDurations(prices, choice, plan, lone_shares(spans, plan, prices.setting.cluster.devices))
        slots, took = _within(prices, choice, plan, durations, room.pool)
    return _forecast(prices.setting, choice, plan, room, durations, took, min(slots, -(-work.answers // lanes)))


def _within(
    prices: StageTimes, choice: Candidate, plan: Plan, durations: PlanDurations, pool: float
) -> tuple[int, Simulated]:
    """How many answers a lane may generate at a time without its caches outgrowing the pool, and the step with them.

    The largest number that usually has room is tried first, then fewer by somewhat more than it was too many, and
    in the end a number that cannot fail.
    """
    work = prices.setting.workload
    if not work.paged:  # which lets in what has room however long it becomes
        slots = min(prices.slots(choice, pool), work.answers)
        return slots, run_step(prices, choice, plan, durations, slots)
    slots, least = min(prices.slots(choice, pool), work.answers), max(1, int(pool // work.longest))
    for _ in range(TRIES):
        took = run_step(prices, choice, plan, durations, slots)
        peak = max(took.contexts.values())
        if peak <= pool:
            return slots, took
        slots = max(least, int(FEWER * min(slots, took.active) * pool / peak))
    return least, run_step(prices, choice, plan, durations, least)


def run_step(prices: StageTimes, choice: Candidate, plan: Plan, durations: PlanDurations, slots: int) -> Simulated:
    """One step on the virtual clock, with so many answers at a time on a lane."""
    work = prices.setting.workload
    rounds, before = work.rounds, len(durations.lengths) - work.launched
    step = StepState(plan, _terms(prices, choice, plan, durations, slots), spread=max(work.lengths.sigma, 0.1))
    lengths = {(i, j): tokens for i, group in enumerate(durations.lengths) for j, tokens in enumerate(group)}
    # Nobody knows yet which prompt has long answers.
    launch = {"prompt_tokens": work.prompt, "samples": work.samples}
    launches = [GroupStart(prompt=str(i), expected=work.lengths.mean, **launch) for i in range(work.launched)]
    asked = iter(launches)

    def verdict(index: int) -> Sequence[int]:
        return range(work.samples) if rounds.kept[index - before] else ()

    def more(missing: int) -> list[GroupStart]:
        return list(islice(asked, work.rule.again(missing, rounds=simulation.rounds)))

    def divide(groups: Sequence[int]) -> list[list[RolloutId]]:
        items = [(index, attempt) for index in groups for attempt in range(work.samples)]
        parts = shuffled_parts(items, work.updates, epochs=work.epochs, seed=work.seed, step=1)
        return [sorted(part) for part in parts]

    simulation = Simulation(step, durations, lengths, verdict=verdict, more=more, divide=divide)
    carried = [
        BufferedGroup(launch=launches[index], sizes=tuple(enumerate(durations.lengths[place])))
        for place, index in enumerate(rounds.trained[:before])
    ]
    return simulation.run(list(islice(asked, work.rule.first)), carried)


def _terms(prices: StageTimes, choice: Candidate, plan: Plan, durations: PlanDurations, slots: int) -> StepSpec:
    work = prices.setting.workload
    first = {cell.role: cell for cell in reversed(plan.cells)}
    splits = {cell.name: choice.split(cell.role, work.reading) for cell in plan.cells if cell.role != "generate"}
    budgets = {name: choice.piece(split) for name, split in splits.items()}
    per_token = {}
    for stage in work.stages:
        cell = first[role_of(stage)].name
        site, part = durations.sites[cell], typical(work.judged, budgets[cell])
        per_token[stage] = prices.piece(stage, site, part, choice) / part.tokens
    lane, half = first["generate"].name, work.prompt + work.lengths.mean / 2
    alone, full = durations.tick(lane, 1, half), durations.tick(lane, slots, half)
    once, twice = durations.prefill(lane, work.longest), durations.prefill(lane, 2 * work.longest)
    again = (twice - once) / work.longest
    return StepSpec(
        groups=work.prompts,
        drops=work.acceptance is not None,
        barrier=choice.waits(work),
        divides=work.several,
        stages=work.stages,
        slots={cell.name: slots for cell in plan.cells if cell.role == "generate"},
        budgets=budgets,
        longest=work.lengths.cap,
        speeds=SpeedEstimate(
            tick=alone,
            tick_each=(full - alone) / max(1, slots - 1),
            per_token=per_token,
            switch=prices.costs.rates.far_delay + once - again * work.longest,
            again=again,
        ),
    )


def _forecast(
    setting: PlanningProblem,
    choice: Candidate,
    plan: Plan,
    room: MemoryFit,
    durations: PlanDurations,
    took: Simulated,
    slots: int,
) -> Forecast:
    work, ending = setting.workload, durations.ending
    cells = {cell.name: cell for cell in plan.cells}
    spent: defaultdict[str, float] = defaultdict(float)
    busy = dict.fromkeys(setting.cluster.devices, 0.0)
    for stretch in took.stretches:
        spent[stretch.stage] += stretch.stop - stretch.start
        for device in cells[stretch.cell].devices:
            busy[device] += stretch.stop - stretch.start
    serving = {stage: sum(cell.role == role_of(stage) for cell in plan.cells) for stage in spent}
    step = took.seconds
    workless = sum(not seconds for seconds in busy.values()) - (len(busy) - choice.devices)
    used = sum(seconds + ending.seconds for seconds in busy.values() if seconds)
    return Forecast(
        choice=choice,
        plan=plan,
        room=room,
        setting=setting,
        step=step,
        stages={stage: spent[stage] / serving[stage] for stage in ("generate", *work.stages) if stage in spent},
        ending=ending,
        idle=max(0.0, 1 - used / (step * len(busy))),
        workless=workless,
        tokens=work.tokens,
        slots=slots,
        cached=durations.prices.cached(choice, took.active, max(took.contexts.values())),
        stretches=took.stretches,
        updates=took.updates,
        rounds=took.rounds,
        launched=took.launched,
        gradients=durations.prices.ends.gradient_path(choice),
        weights=durations.prices.ends.weight_path(choice),
    )
