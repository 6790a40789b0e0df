"""Seconds that new weights need to get from where they are trained to where they are sampled from, part by part.

gather   trainers assemble what leaves them from the parts of their ranks
send     it travels, by the path that the devices have (`placement.transport`)
load     an engine of its own takes it in with its loader, tensor by tensor; the native one copies it into place
besides  such an engine stops, is told and goes on

A `WeightRoute` says which of it a system does: this project's (`own_route`), or one that published what it took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from stretto.placement.transport import TensorPath
from stretto.planner.cost.collectives import Wires
from stretto.planner.cost.mesh import Site
from stretto.planner.cost.precision import BYTES, Precision
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import ModelShape

BUCKET = 32 * 2.0**20
"""Bytes that travel at once: those of `weights.carrier`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRoute:
    """What a system does to hand new weights over."""

    path: TensorPath
    """How tensors pass between the two sides."""
    gathers: bool = True
    """Trainers assemble tensors from their ranks' parts before these leave; without it, parts go where they belong."""
    whole: bool = False
    """Every receiver takes in everything and keeps its part of it."""
    paired: bool = False
    """Each receiver is served by a sender of its own through its own network card; otherwise all cards of a host take
    in together what the host needs."""
    bucket: float = BUCKET
    """Bytes that travel at once; 0 for one tensor at a time."""
    overlapped: bool = False
    """One bucket is gathered while another travels and a third is loaded."""
    staged: int = 0
    """Times that each rank's part passes its link to host memory before it is sent: 2 where it waits there, 1 where it
    comes from there."""
    files: bool = False
    """The engine's process reads them from files in host memory, which another one writes."""
    exports: bool = False
    """The trainer's library converts tensors to those of a checkpoint, one by one."""
    loads: bool = False
    """The engine is one of its own, with a loader that takes tensors of a checkpoint, one by one."""
    stacked: bool = False
    """Experts of a layer pass as one tensor, past the loader and before all else."""


class Handover(NamedTuple):
    """What it takes, in seconds."""

    gather: float
    send: float
    load: float
    besides: float
    route: WeightRoute

    @property
    def seconds(self) -> float:
        """All of it."""
        if self.route.stacked and self.route.overlapped:
            return self.send + max(self.gather, self.load) + self.besides
        parts = (self.gather, self.send, self.load)
        return (max(parts) if self.route.overlapped else sum(parts)) + self.besides


def own_route(path: TensorPath, *, engine_apart: bool) -> WeightRoute:
    """What this project does: a full copy is made of the parts, and travels in buckets to everybody who needs it."""
    own = engine_apart
    return WeightRoute(path=path, whole=path is TensorPath.GLOO, files=own, exports=own, loads=own)


def hand_over(
    costs: Costs,
    route: WeightRoute,
    shape: ModelShape,
    trainer: Site,
    engine: Site,
    *,
    receivers: int,
    crosses: bool,
    adapter: int = 0,
    precision: Precision = "bfloat16",
) -> Handover:
    """New weights to `receivers` ranks of engines like this; `crosses`: some are not on the trainers' hosts."""
    rates, mesh = costs.rates, engine.mesh
    stored: Precision = "bfloat16" if adapter else precision
    size = adapter_bytes(shape, adapter) if adapter else BYTES[stored] * shape.params
    routed = 0.0 if adapter else BYTES[stored] * shape.routed_params
    part = size if adapter or route.whole else (size - routed) / mesh.tp + routed / max(mesh.tp, mesh.ep)
    tensors = shape.tensors - (shape.expert_tensors if route.stacked else 0)
    if stored == "fp8":  # with its scales, which do not pass with experts
        tensors = shape.tensors + tensors
    gather = gathering(costs, trainer, size) if route.gathers else 0.0
    if route.exports:
        gather += rates.tensor * tensors
    if route.staged:
        gather += route.staged * costs.move(size / trainer.mesh.devices, trainer)
    load = 0.0
    if route.loads:
        loaded = size - (routed if route.stacked else 0.0)
        calls = math.ceil(loaded / route.bucket) if route.bucket else tensors
        load = rates.tensor * tensors + rates.load * calls
    if route.files:
        load += host_copies(costs, engine, part) + part / rates.gather
    return Handover(
        gather=gather,
        send=sending(costs, route, engine, size, part, receivers=receivers, crosses=crosses),
        load=load,
        besides=rates.handover if route.loads else 0.0,
        route=route,
    )


def gathering(costs: Costs, trainer: Site, size: float) -> float:
    """Assembling `size` bytes on every rank that holds a part of them."""
    mesh = trainer.mesh
    spread = mesh.devices if mesh.zero == 3 else mesh.pp * max(mesh.tp, mesh.ep)
    return Wires.between(trainer, spread, rates=costs.rates).all_gather(size) if spread > 1 else 0.0


def sending(
    costs: Costs, route: WeightRoute, engine: Site, size: float, part: float, *, receivers: int, crosses: bool
) -> float:
    """`size` bytes to the devices that generate, of which each takes in a part."""
    rates, device = costs.rates, engine.device
    match route.path:
        case TensorPath.SHARED | TensorPath.FILE:  # files are the engine's way to load
            return 0.0
        case TensorPath.IPC:  # read here and written there, in the same memory
            return 2 * part / device.bandwidth
        case TensorPath.GLOO:  # a tree of processes, each of which copies to its host's memory and back
            rounds = math.ceil(math.log2(1 + receivers))
            return host_copies(costs, engine, size) + rounds * (rates.far_delay + size / rates.gather)
        case TensorPath.NCCL:
            wires = Wires.between(engine, receivers, rates=rates)
            if route.paired or not crosses:
                rate = wires.near_rate if not crosses else wires.far_rate
                return rates.far_delay + part / rate
            return replace(wires, far=max(2, wires.far)).broadcast(size, part)


def host_copies(costs: Costs, site: Site, size: float) -> float:
    """From one device's memory to its host's, and from there to another's; nothing where they are one."""
    return 2 * costs.move(size, site) if site.device.kind.has_own_memory else 0.0


def adapter_bytes(shape: ModelShape, rank: int) -> float:
    """Bytes of a LoRA's matrices."""
    return 2.0 * rank * shape.linear_inputs


def reshard(costs: Costs, shape: ModelShape, trainer: Site, engine: Site) -> float:
    """From the layout that trains to the one that generates, on the same devices.

    A rank needs 1/g of every layer and lacks what it does not train itself: of parts 1/(t p), and its share of
    sharded weights, it holds that much; experts that are spread lie elsewhere (Sheng et al. 2024, HybridFlow),
    unless they are spread alike.
    """
    part = 1 / max(engine.mesh.tp, engine.mesh.ep)
    mesh = trainer.mesh
    own = min(1 / mesh.tp, part) / mesh.pp / (mesh.sharding if mesh.zero == 3 else 1)
    routed = shape.routed_params * (part if mesh.ep > 1 else part - own)
    if mesh.same_experts(engine.mesh):
        routed = 0.0
    common = (shape.params - shape.routed_params) * (part - own)
    return Wires.between(trainer, mesh.devices, rates=costs.rates).fetch(2.0 * (common + routed))
