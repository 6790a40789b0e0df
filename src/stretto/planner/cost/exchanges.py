"""Seconds in which the ranks that hold parts or copies of one model exchange its weights and gradients.

Inside a cell whose weights are sharded they are gathered for every pass, and gradients are scattered in every backward
(ZeRO stage 3, Rajbhandari 2020); between copies gradients are added up once, when all are accumulated. `common` and
`routed` count bytes or parameters: what every token passes through, and experts, which go among their own copies only.
"""

from __future__ import annotations

from stretto.placement.rates import Rates
from stretto.planner.cost.collectives import Wires
from stretto.planner.cost.mesh import Site


def over_shards(site: Site, common: float, routed: float, rates: Rates) -> float:
    """Gathering so many bytes of a cell's model once, or scattering them; nothing where ranks hold all of it."""
    mesh = site.mesh
    if mesh.zero < 3 or mesh.sharding == 1:
        return 0.0
    wires = Wires.between(site, mesh.sharding, stride=mesh.tp, rates=rates)
    if mesh.ep == 1 or not routed:
        return wires.all_gather((common + routed) / mesh.model)
    seconds = wires.all_gather(common / mesh.model)
    if mesh.expert_copies > 1:
        apart = Wires.between(site, mesh.expert_copies, stride=mesh.ep * mesh.pp, rates=rates)
        seconds += apart.all_gather(routed / (mesh.pp * mesh.ep))
    return seconds


def held_of(site: Site, common: float, routed: float) -> float:
    """Of so many parameters that are trained, those that one rank updates."""
    mesh = site.mesh
    held = common / mesh.model / (mesh.sharding if mesh.zero else 1)
    return held + routed / (mesh.pp * mesh.ep) / (mesh.expert_copies if mesh.zero else 1)


def over_copies(site: Site, common: float, routed: float, cells: int, rates: Rates, *, wire: float) -> float:
    """Adding up the gradients of so many parameters in this cell and `cells` - 1 equal ones, from device to device, in
    `wire` bytes each.

    Where weights are sharded each backward has scattered the cell's own, and shards are added up with their like. Below
    that fp32 gradients are scattered and bf16 weights gathered, as much as an all-reduce of 3 bytes, or sums are
    reduced where each rank keeps all of them.
    """
    mesh = site.mesh
    if mesh.zero == 3:
        alike = Wires.between(site, cells, stride=mesh.devices, rates=rates)
        return alike.all_reduce(wire * held_of(site, common, routed)) if cells > 1 else 0.0
    wire, copies = 3.0 if mesh.zero else wire, mesh.sharding * cells
    wires = Wires.between(site, copies, stride=mesh.model, rates=rates)
    seconds = wires.all_reduce(wire * common / mesh.model) if copies > 1 else 0.0
    if routed and mesh.expert_copies * cells > 1:
        apart = Wires.between(site, mesh.expert_copies * cells, stride=mesh.ep * mesh.pp, rates=rates)
        seconds += apart.all_reduce(wire * routed / (mesh.pp * mesh.ep))
    return seconds
