"""How much of its work a cell does while the other devices of its host stand idle.

Threads of a CPU share clocks, caches and memory: one that computes while the others do not is faster
(`Rates.lone`). When that is, only the whole step tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from stretto.placement.devices import Device
from stretto.placement.plan import Plan

Span = tuple[str, float, float]
"""A cell, and when it began and ended something."""


def lone_shares(spans: Sequence[Span], plan: Plan, known: Mapping[str, Device]) -> dict[str, float]:
    """Cell -> the share of its work's time for which a device of it has others of its host idle, on average over these;
    those of the same cell work with it.

    `known` are all devices, by name. One that has no other is a thread among idle cores, or takes all of them.
    """
    devices = {cell.name: cell.devices for cell in plan.cells}
    beside = {
        cell: {name for name in known if _host(name) == _host(held[0])} - {held[0]} for cell, held in devices.items()
    }
    without = {cell: float(known[held[0]].threads <= 1) for cell, held in devices.items()}
    edges = sorted([(start, 1, cell) for cell, start, _ in spans] + [(stop, -1, cell) for cell, _, stop in spans])
    open_spans: defaultdict[str, int] = defaultdict(int)
    worked: defaultdict[str, float] = defaultdict(float)
    alone: defaultdict[str, float] = defaultdict(float)
    before = edges[0][0] if edges else 0.0
    for now, change, cell in edges:
        active = [name for name, count in open_spans.items() if count] if now > before else []
        busy = {device for name in active for device in devices[name]}
        for name in active:
            others = beside[name]
            worked[name] += now - before
            alone[name] += (now - before) * (len(others - busy) / len(others) if others else without[name])
        open_spans[cell] += change
        before = now
    return {name: alone[name] / seconds for name, seconds in worked.items()}


def _host(device: str) -> str:
    return device.partition("/")[0]
