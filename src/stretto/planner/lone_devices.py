"""How much of its work a cell does while the other devices of its host stand idle.

Threads of a CPU share clocks, caches and memory: one that computes while the others do not is faster
(`Rates.lone`). When that is, only the whole step tells.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from stretto.placement.devices import Device, host_of
from stretto.placement.plan import Plan

Span = tuple[str, float, float]
"""A cell, and when it began and ended something."""


def lone_shares(spans: Sequence[Span], plan: Plan, known: Mapping[str, Device]) -> dict[str, float]:
    """Cell -> the share of its work's time for which a device of it has others of its host idle, on average over these;
    those of the same cell work with it.

    `known` are all devices, by name. One that has no other is a thread among idle cores, or takes all of them.
    """
    devices = {cell.name: cell.devices for cell in plan.cells}
    sizes = Counter(map(host_of, known))
    hosts = {host_of(name): _Host(sizes[host_of(name)], one.threads <= 1) for name, one in known.items()}
    worked: defaultdict[str, float] = defaultdict(float)
    alone: defaultdict[str, float] = defaultdict(float)
    under_way: Counter[str] = Counter()
    lasting = [span for span in spans if span[2] > span[1]]
    edges = sorted([(start, 1, cell) for cell, start, _ in lasting] + [(stop, -1, cell) for cell, _, stop in lasting])
    for now, change, cell in edges:
        before, under_way[cell] = under_way[cell], under_way[cell] + change
        if bool(before) == bool(under_way[cell]):
            continue  # it went on with something else
        # What a counter has at the end less what it had at the beginning, over all stretches of a cell.
        worked[cell] -= change * now
        alone[cell] -= change * hosts[host_of(devices[cell][0])].idle(now)
        for device in devices[cell]:
            hosts[host_of(device)].change(device, change, now)
    return {name: alone[name] / seconds for name, seconds in worked.items()}


class _Host:
    """The devices of a host, of which some work."""

    def __init__(self, size: int, single: bool) -> None:
        self.size, self.single, self.working = size, single, 0
        self._under_way: Counter[str] = Counter()
        self._seconds, self._until = 0.0, 0.0

    def idle(self, now: float) -> float:
        """Seconds up to now, each times the share of the others that are idle for one that works."""
        share = (self.size - self.working) / (self.size - 1) if self.size > 1 else float(self.single)
        self._seconds += (now - self._until) * share
        self._until = now
        return self._seconds

    def change(self, device: str, count: int, now: float) -> None:
        """A device of it begins or ends something now."""
        self.idle(now)
        before, self._under_way[device] = self._under_way[device], self._under_way[device] + count
        self.working += (self._under_way[device] > 0) - (before > 0)
