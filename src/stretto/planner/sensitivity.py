"""On which constant of the prices the order of the two best plans hangs, and at which value it turns.

One constant at a time is made larger and smaller than it is. Closed forms, scaled to what the simulation said, tell
where the second plan would pass the first; the nearest such point is then looked for with the simulation itself, where
that is quick. It says nothing of several constants that are wrong together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.estimate import estimate
from stretto.planner.problem import PlanningProblem
from stretto.planner.simulate import Forecast, simulate

FARTHEST = 8.0
"""Times that a constant may be larger or smaller than it is: nobody knows one much worse."""
HALVINGS = 9
"""Of that span, by closed forms."""
SIMULATED_HALVINGS = 3
"""Of the stretch around what closed forms say, by simulations."""
AROUND = 2.0
"""How far from there a simulation looks: closed forms know tails and idle cells by a few marks."""
QUICK = 4096
"""Answers times devices up to which plans are simulated again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceConstant:
    """Something physical that prices are made of; one or several rates that stand for it together."""

    name: str
    """For programs."""
    rates: tuple[str, ...]
    """Names of the rates."""
    words: str
    """What it is, up to its value."""
    unit: str
    """The unit of the value."""
    value: Callable[[PlanningProblem], float]
    """The value, in that unit."""


def _gigabytes(rate: str, of: str) -> Callable[[PlanningProblem], float]:
    return lambda setting: getattr(setting.costs.rates, rate) * getattr(setting.ordered[0][1], of) / 1e9


def _rate(name: str, scale: float = 1.0) -> Callable[[PlanningProblem], float]:
    return lambda setting: getattr(setting.costs.rates, name) * scale


def _step(setting: PlanningProblem) -> float:
    rates = setting.costs.rates
    return 1e3 * (rates.tick + rates.tick_layer * setting.workload.shapes["generate"].layers)


CONSTANTS = (
    PriceConstant(
        name="products", rates=("matmul_share",), words="products reach", unit="TFLOP/s",
        value=lambda setting: setting.costs.rates.matmul_share * setting.ordered[0][1].matmul / 1e12,
    ),
    PriceConstant(
        name="decode_bandwidth", rates=("decode_share",), words="decoding reads", unit="GB/s",
        value=_gigabytes("decode_share", "bandwidth"),
    ),
    PriceConstant(
        name="link", rates=("link_share",), words="the link between devices reaches", unit="GB/s",
        value=_gigabytes("link_share", "link"),
    ),
    PriceConstant(
        name="network", rates=("nic_share",), words="the network reaches", unit="GB/s a device",
        value=_gigabytes("nic_share", "nic"),
    ),
    PriceConstant(
        name="host_link", rates=("host_share",), words="copies to host memory reach", unit="GB/s",
        value=_gigabytes("host_share", "host_link"),
    ),
    PriceConstant(
        name="gloo", rates=("gather",), words="gloo reaches", unit="GB/s", value=_rate("gather", 1e-9)
    ),
    PriceConstant(
        name="decode_step", rates=("tick", "tick_layer"), words="a decode step takes, besides reading,", unit="ms",
        value=_step,
    ),
    PriceConstant(
        name="plain_step", rates=("plain_layer",), words="a decode step that is not recorded takes", unit="ms a layer",
        value=_rate("plain_layer", 1e3),
    ),
    PriceConstant(
        name="change_of_stage", rates=("phase",), words="a change of stage takes a process", unit="ms",
        value=_rate("phase", 1e3),
    ),
    PriceConstant(
        name="update", rates=("update",), words="an update takes, besides its bytes,", unit="ms a doubling of devices",
        value=_rate("update", 1e3),
    ),
    PriceConstant(
        name="delay", rates=("far_delay",), words="a hop between hosts takes", unit="us",
        value=_rate("far_delay", 1e6),
    ),
    PriceConstant(
        name="piece", rates=("piece",), words="a micro-batch takes, besides its work,", unit="ms a layer",
        value=_rate("piece", 1e3),
    ),
    PriceConstant(
        name="wake", rates=("wake",), words="the engine wakes in", unit="s", value=_rate("wake")
    ),
    PriceConstant(
        name="loader", rates=("tensor",), words="the engine's loader takes a tensor in", unit="us",
        value=_rate("tensor", 1e6),
    ),
)  # fmt: skip
"""What is tried, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurningPoint:
    """Where the order of two plans turns."""

    constant: PriceConstant
    """Which constant it hangs on."""
    now: float
    """The constant's value, in its unit."""
    at: float
    """Where the second plan passes the first."""
    first: str
    """The plan that is first now."""
    then: str
    """The one that is first beyond."""

    def __str__(self) -> str:
        least, beyond = ("at least", "below") if self.at < self.now else ("at most", "above")
        words, unit = self.constant.words, self.constant.unit
        return (
            f"{self.first} is first while {words} {least} {_plain(self.at)} {unit} ({_plain(self.now)} here); "
            f"{beyond} that {self.then}"
        )

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "constant": self.constant.name, "unit": self.constant.unit, "now": self.now, "at": self.at,
            "first": self.first, "then": self.then,
        }  # fmt: skip


def turning_point(best: tuple[Forecast, ...], setting: PlanningProblem) -> TurningPoint | None:
    """The nearest value of one constant at which the second of these plans would be first; none if none is near."""
    if len(best) < 2:
        return None
    first, second = best[:2]
    ahead = _Ahead(setting, first, second)
    for constant, factor in sorted(ahead.turns(), key=lambda found: abs(math.log(found[1]))):
        if (exact := ahead.simulated(constant, factor)) is not None:
            now = constant.value(setting)
            return TurningPoint(
                constant=constant, now=now, at=now * exact, first=first.choice.label, then=second.choice.label
            )
    return None


class _Ahead:
    """By how much the first of two plans is ahead when a constant is larger or smaller."""

    def __init__(self, setting: PlanningProblem, first: Forecast, second: Forecast) -> None:
        self.setting, self.both = setting, (first, second)
        self.scales = [
            each.step / estimate(StageTimes(each.setting), each.choice, each.room.pool) for each in self.both
        ]
        self.quick = setting.workload.answers * len(setting.names) <= QUICK

    def _prices(self, constant: PriceConstant, factor: float) -> list[tuple[Forecast, StageTimes]]:
        """Each plan with prices on its own order of devices, which are the same where that is."""
        rates, (first, second) = self.setting.costs.rates, self.both
        changed = {name: factor * getattr(rates, name) for name in constant.rates}
        costs = replace(self.setting.costs, rates=replace(rates, **changed))
        prices = StageTimes(first.setting.repriced(costs))
        alike = second.setting is first.setting
        return [(first, prices), (second, prices if alike else StageTimes(second.setting.repriced(costs)))]

    def by_closed_forms(self, constant: PriceConstant, factor: float) -> float:
        """Seconds; below zero where the second plan is first."""
        first, second = (
            scale * estimate(prices, each.choice, each.room.pool)
            for scale, (each, prices) in zip(self.scales, self._prices(constant, factor), strict=True)
        )
        return second - first

    def by_simulation(self, constant: PriceConstant, factor: float) -> float:
        """The same."""
        priced = self._prices(constant, factor)
        first, second = (simulate(prices, each.choice, each.room).step for each, prices in priced)
        return second - first

    def turns(self) -> Iterator[tuple[PriceConstant, float]]:
        """(constant, factor) of every one that turns the order within the span."""
        for constant in CONSTANTS:
            if not any(getattr(self.setting.costs.rates, name) for name in constant.rates):
                continue
            for farthest in (FARTHEST, 1 / FARTHEST):
                if self.by_closed_forms(constant, farthest) < 0:
                    yield constant, _between(partial(self.by_closed_forms, constant), farthest, HALVINGS)

    def simulated(self, constant: PriceConstant, factor: float) -> float | None:
        """Where it turns in simulations, beginning with what closed forms say; none if it does not turn near there."""
        if not self.quick:
            return factor
        farther = factor * (AROUND if factor > 1 else 1 / AROUND)
        if self.by_simulation(constant, farther) >= 0:
            return None
        return _between(partial(self.by_simulation, constant), farther, SIMULATED_HALVINGS)


def _plain(value: float) -> str:
    """Three digits that say something, without an exponent."""
    return f"{float(f'{value:.3g}'):,.10g}"


def _between(ahead: Callable[[float], float], far: float, halvings: int) -> float:
    """Where a plan that is ahead at 1 is passed before `far`, by halving on a logarithmic scale."""
    near = 1.0
    for _ in range(halvings):
        middle = math.sqrt(near * far)
        near, far = (near, middle) if ahead(middle) < 0 else (middle, far)
    return math.sqrt(near * far)
