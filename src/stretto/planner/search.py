"""Finds the best plans: rules and closed forms say which choices are worth it, the scheduler's simulation decides.

The search is the same every time: choices are looked at in a fixed order, lengths are drawn once, and nothing depends
on a clock. Of every strategy the best plan is kept, so that they can be compared, or the reason why it has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from stretto.config.schema import Placement
from stretto.placement.cluster import Cluster, Host
from stretto.placement.strategies import PRESETS
from stretto.planner.choice import Choice
from stretto.planner.estimate import estimate, floor
from stretto.planner.grid import WORTH_A_LOOK, Grid, Variant
from stretto.planner.price import Prices
from stretto.planner.room import Room, Rooms
from stretto.planner.setting import Setting
from stretto.planner.simulate import Forecast, simulate

SIMULATED = 10
"""Choices that are simulated of each number of devices that may be worth it."""
SLACK = 1.1
"""By so much a simulation may be faster than the closed forms, which know lengths by a few marks only."""
ANSWERS = 40_000
"""Answers that all simulations together may generate where that leaves each strategy two."""
CLOSE = 0.05
"""Seconds that differ by a smaller share are as good as equal, because the cost model is not that exact."""
LARGEST = 8192
"""Devices of the largest cluster that is tried where nothing fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search came to."""

    best: tuple[Forecast, ...]
    """The best of each strategy that fits, the fastest first."""
    rejected: tuple[tuple[str, str], ...]
    """(strategy, why) of the others."""
    ready: tuple[Forecast, ...]
    """The best of each strategy that can be executed as things stand, the fastest first."""
    misses: tuple[str, ...]
    """What of that were plans that do not fit, one by one with why."""
    weighed: int
    """Choices whose memory was counted."""
    simulated: int
    """Choices that were simulated."""

    @property
    def today(self) -> Forecast | None:
        """The fastest that can be executed as things stand."""
        return self.ready[0] if self.ready else None


def search(setting: Setting, variants: tuple[Variant, ...]) -> Found:
    """The best plan of each of these strategies."""
    prices, rooms = Prices(setting), Rooms(setting)
    grid = Grid(setting, prices, rooms)
    most = min(SIMULATED, max(2 * len(variants), ANSWERS // setting.workload.answers))
    rejected: dict[str, str] = {}
    best: list[Forecast] = []
    tried = 0
    ready: list[Forecast] = []
    for variant in variants:
        why = variant.cannot(setting)
        forecasts = [] if why else _simulated(grid, prices, variant, max(1, most // len(variants)))
        if forecasts:
            best.append(min(forecasts, key=_seconds))
            ready += sorted((each for each in forecasts if _runs(each.choice, setting)), key=_seconds)[:1]
            tried += len(forecasts)
        else:
            rejected[variant.label] = why or _miss(grid, variant, setting)
    best.sort(key=_seconds)
    ready.sort(key=_seconds)
    return Found(
        best=tuple(best),
        rejected=tuple(rejected.items()),
        ready=tuple(ready),
        misses=tuple(f"{name}: {rejected[name]}" for name in grid.misses if name in rejected),
        weighed=grid.weighed,
        simulated=tried,
    )


def _simulated(grid: Grid, prices: Prices, variant: Variant, quota: int) -> list[Forecast]:
    """Forecasts of a strategy: of each number of devices the most promising choices, from all devices to one.

    What is simulated for a number of devices does not depend on how many there are besides. So the best plan never
    gets worse with more of them. A number is passed over where its stages alone take longer than a forecast.
    """
    found: list[Forecast] = []
    for size in grid.sizes():
        choices = list(grid.choices(variant, size))
        floors = sorted((floor(prices, choice), index) for index, choice in enumerate(choices))
        if not floors or (found and floors[0][0] > SLACK * min(map(_seconds, found))):
            continue
        ranked = _ranked(grid, prices, variant, choices, floors)
        chosen = ranked[:quota]
        chosen += [item for item in ranked[quota:] if _runs(item[1], grid.setting)][:1]
        found += [simulate(prices, choice, room) for _, choice, room in chosen]
    return found


def _seconds(forecast: Forecast) -> float:
    return forecast.step


def _runs(choice: Choice, setting: Setting) -> bool:
    """True if a choice can be executed today."""
    return not any(True for _ in choice.waits_for(setting.workload))


def variants_of(section: Placement, only: str | None = None) -> tuple[Variant, ...]:
    """The strategies to compare: all, with both presets and the recipe's own fractions, or those of one name."""
    shares = dict.fromkeys((*PRESETS.values(), _shares(section)))
    found = [
        Variant(strategy="flatten"),
        *(Variant(strategy="interleave", fractions=each) for each in shares),
        Variant(strategy="separate"),
        Variant(strategy="elastic"),
    ]
    return tuple(variant for variant in found if only in (None, variant.strategy))


def named_by(section: Placement) -> str:
    """The strategy that a recipe itself asks for, as it is listed."""
    if section.strategy != "interleave":
        return section.strategy
    return Variant(strategy="interleave", fractions=_shares(section)).label


def _shares(section: Placement) -> tuple[Fraction, ...]:
    """The fractions of a recipe, as exact numbers."""
    told = section.fractions
    if told is None or isinstance(told, str):
        return PRESETS[told or "I1"]
    return tuple(Fraction(str(share)).limit_denominator(LARGEST) for share in told)


def _ranked(
    grid: Grid, prices: Prices, variant: Variant, choices: list[Choice], floors: list[tuple[float, int]]
) -> list[tuple[float, Choice, Room]]:
    """Of these choices those that fit, by their closed forms."""
    found: list[tuple[float, Choice, Room]] = []
    best = float("inf")
    for least, index in floors:
        if least > WORTH_A_LOOK * best:
            break
        for fitting, room in grid.fitting(choices[index], variant):
            seconds = estimate(prices, fitting, room.pool)
            best = min(best, seconds)
            found.append((seconds, fitting, room))
    found.sort(key=lambda item: item[0])
    return found


def _miss(grid: Grid, variant: Variant, setting: Setting) -> str:
    miss = grid.misses.get(variant.label)
    if miss is None:
        return f"its shares do not divide {len(setting.names)} devices"
    return miss.room.why_not(setting.workload.longest)


def smallest_cluster(setting: Setting, variants: tuple[Variant, ...]) -> int | None:
    """How many devices, of the kind that there are most of, would hold the step; none if no number would."""
    for count in _counts(len(setting.names)):
        larger = replace(setting, cluster=_cluster(setting, count), memo={})
        grid = Grid(larger, Prices(larger), Rooms(larger))
        for variant in variants:
            if variant.cannot(larger) is None:
                choices = grid.choices(variant, count)
                if any(True for choice in choices for _ in grid.fitting(choice, variant)):
                    return count
    return None


def _counts(beyond: int) -> Iterator[int]:
    """Round numbers above one."""
    yield from sorted(size for i in range(14) for size in (2**i, 3 * 2**i) if beyond < size <= LARGEST)


def _cluster(setting: Setting, count: int) -> Cluster:
    host = max(setting.cluster.hosts, key=lambda host: host.count)
    per = max(host.count, host.device.per_host)
    full, rest = divmod(count, per)
    sizes = [per] * full + [rest] * bool(rest)
    hosts = tuple(
        Host(name=f"host{i}", device=host.device, count=size, memory=host.device.host_memory * size)
        for i, size in enumerate(sizes)
    )
    return Cluster(hosts=hosts, rates=setting.cluster.rates)
