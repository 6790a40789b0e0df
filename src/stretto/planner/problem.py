"""A workload on a cluster, with the constants of its cost model: what every question of the planner is about.

Devices stand in the order in which plans use them. Where there are several kinds, those that have most memory
bandwidth for their arithmetic come first: decoding reads weights and caches for every token and is bound by bandwidth,
training is bound by arithmetic, and `separate` lets the first devices generate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import NamedTuple

from stretto.engines.native.admission import CACHE_SHARE
from stretto.placement.cluster import Cluster
from stretto.placement.devices import Device
from stretto.placement.plan import Plan
from stretto.placement.rates import Rates
from stretto.planner.cost.mesh import Mesh, Site
from stretto.planner.cost.seconds import Costs
from stretto.planner.workload import StepWorkload


class ModelSplit(NamedTuple):
    """How the devices of one cell share a model. A tuple, because much is looked up by it."""

    dp: int = 1
    """Ranks that hold a shard of everything, and gather what they need."""
    tp: int = 1
    """Ranks that share every matrix."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Ranks over which experts are spread; among those above."""

    @property
    def width(self) -> int:
        """Devices of the cell."""
        return self.dp * self.tp * self.pp

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of parallelism, as a cell's mesh has them."""
        return {"dp_shard": self.dp, "tp": self.tp, "pp": self.pp, "ep": self.ep}

    @property
    def mesh(self) -> Mesh:
        """The mesh, as the cost model reads it."""
        return _mesh(self)


@cache
def _mesh(split: ModelSplit) -> Mesh:
    return Mesh.of_mesh(split.degrees, split.width)


ALONE = ModelSplit()
"""A cell of one device."""


@dataclass(frozen=True, kw_only=True)
class PlanningProblem:
    """What is planned, and for what."""

    workload: StepWorkload
    """The step."""
    cluster: Cluster
    """What there is."""
    costs: Costs
    """The cost model with its constants."""
    order: tuple[str, ...] = ()
    """Names of the devices in the order in which plans use them; none for the usual one."""
    source: str | None = None
    """Where the constants come from, in words; none for the usual ones."""
    memo: dict[tuple[int, int], Device] = field(default_factory=dict, init=False, repr=False)
    """Devices that were compared already."""
    beside: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False)
    """How many of them share a host, as far as it was asked."""
    sites: dict[tuple[ModelSplit, int, int], Site] = field(default_factory=dict, init=False, repr=False)
    """Cells on some of them, as far as they were asked for."""
    alike: dict[Site, Site] = field(default_factory=dict, init=False, repr=False)
    """One of those that are equal, so that what is known of it is known of all."""

    @classmethod
    def of(cls, workload: StepWorkload, cluster: Cluster, *, source: str | None = None) -> PlanningProblem:
        """The problem with the cluster's own constants, where it has any."""
        kind = cluster.hosts[0].device.kind
        costs = Costs(
            rates=Rates.of(cluster.rates, kind=kind), widens=workload.engine != "vllm", recorded=workload.recorded
        )
        return cls(workload=workload, cluster=cluster, costs=costs, source=source)

    def with_caches_of(self, plan: Plan) -> PlanningProblem:
        """The same with the room for caches that a plan gives the native engine, or that it takes by itself."""
        if self.workload.paged or self.workload.share is not None:
            return self
        shares = [cell.memory_share for cell in plan.cells if cell.memory_share is not None]
        return replace(self, workload=replace(self.workload, share=min(shares, default=CACHE_SHARE)))

    def repriced(self, costs: Costs) -> PlanningProblem:
        """The same with other constants; what is known of the devices stays known."""
        found = replace(self, costs=costs)
        known = ("ordered", "names", "index", "mixed", "hosts", "memo", "beside", "sites", "alike")
        vars(found).update({name: value for name, value in vars(self).items() if name in known})
        return found

    @cached_property
    def ordered(self) -> tuple[tuple[str, Device], ...]:
        """(name, device), those that suit generation first, or in the order that was asked for."""
        if self.order:
            return tuple((name, self.cluster.devices[name]) for name in self.order)
        return tuple(sorted(self.cluster.devices.items(), key=lambda item: -item[1].bandwidth / item[1].matmul))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the devices, in that order."""
        return tuple(name for name, _ in self.ordered)

    @cached_property
    def index(self) -> dict[str, int]:
        """Name -> place in that order."""
        return {name: index for index, name in enumerate(self.names)}

    @cached_property
    def mixed(self) -> bool:
        """True if there are several kinds of devices."""
        return len(self.cluster.pools()) > 1

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """Index of the host of each device, in their order."""
        by_name = {name: index for index, host in enumerate(self.cluster.hosts) for name in host.names}
        return tuple(by_name[name] for name in self.names)

    def together(self, first: int, count: int) -> int:
        """How many of these devices share a host, on the host that has fewest of them."""
        if (first, count) not in self.beside:
            self.beside[first, count] = min(Counter(self.hosts[first : first + count]).values())
        return self.beside[first, count]

    def weakest(self, first: int, count: int) -> Device:
        """What every one of these devices can do at least."""
        if not self.mixed:
            return self.ordered[0][1]
        if (first, count) not in self.memo:
            self.memo[first, count] = _weakest({device for _, device in self.ordered[first : first + count]})
        return self.memo[first, count]

    def site(self, split: ModelSplit, first: int, count: int) -> Site:
        """A cell on some of these devices."""
        key = (split, first, count)
        if key not in self.sites:
            together = self.together(first, count)
            site = Site(device=self.weakest(first, count), mesh=split.mesh, per_host=together)
            self.sites[key] = self.alike.setdefault(site, site)
        return self.sites[key]


def _weakest(devices: Iterable[Device]) -> Device:
    """The least of every number: ranks of a cell wait for each other."""
    several = sorted(devices, key=lambda device: device.name)
    numbers = [item.name for item in fields(Device) if isinstance(getattr(several[0], item.name), (int, float))]
    return replace(several[0], **{name: min(getattr(device, name) for device in several) for name in numbers})
