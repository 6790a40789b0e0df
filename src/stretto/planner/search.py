"""Finds the best plans: rules and closed forms say which choices are worth it, the scheduler's simulation decides.

The search is the same every time: choices are looked at in a fixed order, lengths are drawn once, and nothing depends
on a clock. Of every strategy the best plan is kept, so that they can be compared, or the reason why it has none.
"""

from __future__ import annotations

import gc
import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice

from stretto.placement.baselines import record_of
from stretto.placement.build import shares_of
from stretto.placement.cluster import Cluster, Host
from stretto.placement.partitions import Partition
from stretto.placement.strategies import STRATEGIES, Strategy, find_strategy
from stretto.planner.candidate import Candidate
from stretto.planner.cost.memory_fit import MemoryFit, MemoryFits
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.enumerate import WORTH_A_LOOK, Candidates, Variant
from stretto.planner.estimate import estimate
from stretto.planner.problem import PlanningProblem
from stretto.planner.simulate import Forecast, simulate
from stretto.planner.workload import StepWorkload
from stretto.recipe.schema import Placement

SIMULATED = 12
"""Choices that are simulated of each number of devices that may be worth it."""
LEAST = 2
"""So many of each strategy, however many strategies are asked about."""
SLACK, MIXED = 1.15, 1.3
"""What takes this many times as long by its closed forms as something did in a simulation is not simulated itself:
closed forms know lengths by a few marks only, where devices are of several kinds every cell as the weakest, and of no
core that works alone."""
ANSWERS = 40_000
"""Answers that the simulations of a number of devices may generate together; each strategy has one at least."""
CLOSE = 0.05
"""Seconds that differ by a smaller share are as good as equal, because the cost model is not that exact."""
LARGEST = 8192
"""Devices of the largest cluster that is tried where nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search came to."""

    best: tuple[Forecast, ...]
    """The best of each strategy that fits, the fastest first."""
    rejected: tuple[tuple[str, str], ...]
    """(strategy, why) of the others."""
    ready: tuple[Forecast, ...]
    """The best of each strategy that can be executed as things stand, the best first: the fastest, but for plans whose
    devices share matrices or experts, which have to be ahead of plain ones by `CLOSE`, and for slices, which have to be
    ahead of whole models by half of that."""
    waiting: tuple[Forecast, ...]
    """What of `best` cannot be executed as things stand."""
    misses: tuple[str, ...]
    """What of that were plans that do not fit, one by one with why."""
    weighed: int
    """Choices whose memory was counted."""
    simulated: int
    """Choices that were simulated."""

    def beside(self, forecast: Forecast, workload: StepWorkload) -> SearchResult:
        """With a plan that was not searched for."""
        best = tuple(sorted((*self.best, forecast), key=_seconds))
        ready, waiting = self.ready, self.waiting
        if forecast.choice.runs(workload):
            ready = tuple(sorted((*ready, forecast), key=_seconds_to_beat))
        else:
            waiting = tuple(sorted((*waiting, forecast), key=_seconds))
        return replace(self, best=best, ready=ready, waiting=waiting, simulated=self.simulated + 1)

    @property
    def today(self) -> Forecast | None:
        """The best that can be executed as things stand."""
        return self.ready[0] if self.ready else None

    @property
    def listed(self) -> tuple[Forecast, ...]:
        """What can be executed, the best first, and behind it what is the best of a strategy and cannot."""
        return (*self.ready, *self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCandidate:
    """A choice that fits, before it is simulated."""

    seconds: float
    """Seconds of a step by its closed form."""
    choice: Candidate
    """Itself."""
    room: MemoryFit
    """The candidate's memory."""
    runs: bool
    """True if it can be executed today."""


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Nothing that a search makes is held in a circle, and looking for some took a third of its time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@_without_collecting()
def search(setting: PlanningProblem, variants: tuple[Variant, ...]) -> SearchResult:
    """The best plan of each of these strategies."""
    prices, rooms = StageTimes(setting), MemoryFits(setting)
    grid = Candidates(setting, prices, rooms)
    most = min(SIMULATED, ANSWERS // setting.workload.answers)
    rejected: dict[str, str] = {}
    best: dict[str, Forecast] = {}
    tried = 0
    ready: dict[str, Forecast] = {}
    for variant in variants:
        why = variant.cannot(setting)
        quota = max(1, min(LEAST, most), most // len(variants))
        forecasts = [] if why else _simulated(grid, prices, variant, quota)
        forecasts += [] if why else _borrowed(grid, prices, variant, best.values(), forecasts)
        if forecasts:
            able = [each for each in forecasts if _runs(each, setting.workload)]
            for kept, found, order in ((best, forecasts, _seconds), (ready, able, _seconds_to_beat)):
                for first in sorted(found, key=order)[:1]:
                    label = first.choice.label  # groups of models may come to be a preset
                    kept[label] = min(first, kept.get(label, first), key=order)
            tried += len(forecasts)
        elif not (why and variant.groups):  # that is what the presets say too
            rejected[variant.label] = why or _miss(grid, variant, setting)
    fastest = tuple(sorted(best.values(), key=_seconds))
    return SearchResult(
        best=fastest,
        rejected=tuple(rejected.items()),
        ready=tuple(sorted(ready.values(), key=_seconds_to_beat)),
        waiting=tuple(each for each in fastest if not _runs(each, setting.workload)),
        misses=tuple(f"{name}: {rejected[name]}" for name in grid.misses if name in rejected),
        weighed=grid.weighed,
        simulated=tried,
    )


def _simulated(grid: Candidates, prices: StageTimes, variant: Variant, quota: int) -> list[Forecast]:
    """Forecasts of a strategy: of each number of devices the most promising choices, from all devices to one.

    What is simulated for a number of devices does not depend on how many there are besides, but for what its closed
    forms say is slower than a forecast that there is. So the best plan never gets worse with more of them. What can be
    executed today is held against its like.
    """
    found: list[Forecast] = []
    slack = (MIXED if grid.setting.mixed else SLACK) / (1 - prices.costs.rates.lone)
    bars = {True: math.inf, False: math.inf}
    for size in grid.sizes():
        bounds = _bounds(grid, prices, variant, size)
        if not bounds or bounds[0][0] > bars[False]:
            continue
        for each in _ranked(grid, prices, variant, bounds, quota, bars):
            if each.seconds <= bars[each.runs]:
                found.append(simulate(prices, each.choice, each.room))
                for kind in {False, each.runs}:
                    bars[kind] = min(bars[kind], slack * found[-1].step)
    return found


def _borrowed(
    grid: Candidates, prices: StageTimes, variant: Variant, others: Iterable[Forecast], own: Sequence[Forecast]
) -> list[Forecast]:
    """What a strategy makes of the best layouts of those before it that put models on the same devices.

    How much a stream of small pieces costs, closed forms know only roughly; the layout that is best where stages wait
    for each other is at least worth a look.
    """
    strategy, found = record_of(variant.strategy), list[Forecast]()
    fastest = min((forecast.step for forecast in own), default=math.inf)
    for other in others if variant.strategy in STRATEGIES else ():
        choice = replace(other.choice, strategy=variant.strategy)
        apart = record_of(other.choice.strategy).places is not strategy.places
        known = fastest <= other.step or any(mine.choice == choice for mine in own)
        if apart or known or other.choice.strategy == variant.strategy:
            continue
        for fitting, room in islice(grid.fitting(choice, variant), 1):
            found.append(simulate(prices, fitting, room))
    return found


def _runs(forecast: Forecast, workload: StepWorkload) -> bool:
    """True if a plan that was found can be executed as things stand; what others do is only priced."""
    return forecast.choice.strategy in STRATEGIES and forecast.choice.runs(workload)


def _seconds(forecast: Forecast) -> float:
    return forecast.step


def _seconds_to_beat(forecast: Forecast) -> float:
    """Seconds that a plan is held against others with, among those that can be executed."""
    return forecast.step * _handicap(forecast.choice)


def _handicap(choice: Candidate) -> float:
    """Of plans that are as good as equal the plainer one is chosen: devices that need not talk in every layer, and of
    these such as have whole models, which gather nothing."""
    if choice.whole:
        return 1.0
    return (1 + CLOSE / 2) * (1.0 if choice.plain else 1 + CLOSE)


def variants_of(section: Placement, only: str | None = None) -> tuple[Variant, ...]:
    """The strategies to compare: all, with both presets, the recipe's own fractions and groups of models, or those of
    one name."""
    found = []
    for name, strategy in STRATEGIES.items():
        shares = dict.fromkeys((*strategy.presets.values(), _shares(section, strategy)))
        of_any_groups = [Variant(strategy=name, groups=True)] if strategy.presets else []
        found += [Variant(strategy=name, fractions=each) for each in shares if only in (None, name)]
        found += of_any_groups if only in (None, name) else []
    return tuple(found)


def named_by(section: Placement, devices: int | None = None) -> str:
    """The strategy that a recipe itself asks for, as it is listed for all of so many devices."""
    strategy = find_strategy(section.strategy)
    return section.strategy if section.strategy == "auto" else strategy.label(_shares(section, strategy), devices)


def _shares(section: Placement, strategy: Strategy) -> tuple[Fraction, ...] | Partition | None:
    """The fractions of a recipe as exact numbers, or those that are usual; none where there is nothing to divide."""
    told = section.fractions
    if not strategy.presets:
        return None
    if told is None or isinstance(told, str):
        return strategy.presets[told] if told else next(iter(strategy.presets.values()))
    if isinstance(told, Mapping):
        return shares_of({name: _exact(share) for name, share in told.items()}, LARGEST)
    return tuple(map(_exact, told))


def _exact(share: float) -> Fraction:
    return Fraction(str(share)).limit_denominator(LARGEST)


def _bounds(grid: Candidates, prices: StageTimes, variant: Variant, size: int) -> list[tuple[float, Candidate]]:
    """Every choice on so many devices with its closed form if memory were no matter, the least first."""
    found = [(estimate(prices, choice), choice) for choice in grid.choices(variant, size)]
    return sorted(found, key=lambda item: item[0])


def _ranked(
    grid: Candidates,
    prices: StageTimes,
    variant: Variant,
    bounds: list[tuple[float, Candidate]],
    quota: int,
    bars: Mapping[bool, float],
) -> list[RankedCandidate]:
    """Of these choices those that fit, the best by their closed forms: so many, and one that can be executed.

    `bars` say above which seconds those that cannot be executed, and those that can, are not worth a look.
    """
    found: list[RankedCandidate] = []
    able: list[RankedCandidate] = []
    for least, choice in bounds:
        if found and least > min(WORTH_A_LOOK * found[0].seconds, max(bars.values())):
            break
        runs = choice.runs(grid.setting.workload)
        ahead = _ahead(found, quota, variant)
        beaten = len(ahead) >= quota and least >= ahead[-1].seconds
        plainer = runs and not (able and least * _handicap(choice) >= able[0].seconds * _handicap(able[0].choice))
        if least > bars[runs] or (beaten and not plainer):
            continue
        for fitting, room in grid.fitting(choice, variant):
            seconds = estimate(prices, fitting, room.pool)
            each = RankedCandidate(seconds=seconds, choice=fitting, room=room, runs=fitting.runs(grid.setting.workload))
            insort(found, each, key=lambda item: item.seconds)
            if each.runs:
                insort(able, each, key=lambda item: item.seconds * _handicap(item.choice))
    ahead = _ahead(found, quota, variant)
    return ahead + [each for each in able[:1] if each not in ahead]


def _ahead(found: list[RankedCandidate], quota: int, variant: Variant) -> list[RankedCandidate]:
    """The best so many; where groups are open with different lanes, because else they would differ in little."""
    if not variant.groups:
        return found[:quota]
    return list({each.choice.lane: each for each in reversed(found)}.values())[::-1][:quota]


def _miss(grid: Candidates, variant: Variant, setting: PlanningProblem) -> str:
    miss = grid.misses.get(variant.label)
    if miss is None and variant.groups:
        return "no groups of models have room beside each other"
    if miss is None:
        return f"its shares do not divide {len(setting.names)} devices"
    return miss.room.why_not(setting.workload.longest)


@_without_collecting()
def smallest_cluster(setting: PlanningProblem, variants: tuple[Variant, ...]) -> int | None:
    """How many devices, of the kind that has most memory in all, would hold the step; none if no number would."""
    counts = list(_counts(len(setting.names)))
    if not any(_holds(setting, variants, count) for count in counts[-2:]):
        return None
    return next(count for count in counts if _holds(setting, variants, count))


def _holds(setting: PlanningProblem, variants: tuple[Variant, ...], count: int) -> bool:
    """True if there is a plan over so many devices, without a look at its seconds."""
    larger = replace(setting, cluster=_cluster(setting, count))
    grid = Candidates(larger, StageTimes(larger), MemoryFits(larger))
    able = [variant for variant in variants if variant.cannot(larger) is None]
    return any(True for each in able for choice in grid.choices(each, count) for _ in grid.fitting(choice, each))


def _counts(beyond: int) -> Iterator[int]:
    """Round numbers above one."""
    yield from sorted(size for i in range(14) for size in (2**i, 3 * 2**i) if beyond < size <= LARGEST)


def roomiest(setting: PlanningProblem) -> Host:
    """A host with the kind of device that has most memory in all."""
    memory = {device: count * device.memory for device, count in setting.cluster.pools()}
    return max(setting.cluster.hosts, key=lambda host: (memory[host.device], host.count))


def _cluster(setting: PlanningProblem, count: int) -> Cluster:
    host = roomiest(setting)
    if not host.device.kind.has_own_memory:  # more of them share the same memory
        share = len(setting.names) / count
        less = {name: share * getattr(host.device, name) for name in ("memory", "host_memory")}
        host = replace(host, device=replace(host.device, **less))
    per = max(host.count, host.device.per_host)
    full, rest = divmod(count, per)
    sizes = [per] * full + [rest] * bool(rest)
    hosts = tuple(
        Host(name=f"host{i}", device=host.device, count=size, memory=host.device.host_memory * size)
        for i, size in enumerate(sizes)
    )
    return Cluster(hosts=hosts, rates=setting.cluster.rates)
