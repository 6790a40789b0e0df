"""What a choice needs of every device's memory, phase by phase, and how many tokens are left for caches.

The counts are `planner.cost.memory`'s; here they are put together: what stays on a device while each of its roles
works, what sleeps in host memory meanwhile, and which part is to blame where it does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stretto.engines.native.admission import CACHE_SHARE
from stretto.placement.devices import GB, Device
from stretto.planner.candidate import Candidate, DeviceGroup, Source
from stretto.planner.cost import memory
from stretto.planner.cost.memory import NOTHING, RankMemory
from stretto.planner.cost.mesh import Site
from stretto.planner.problem import PlanningProblem
from stretto.scheduler.records import UPDATE


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMemory:
    """The memory of the devices that serve the same roles."""

    side: DeviceGroup
    """The devices, and the roles that they serve."""
    device: Device
    """The least of the group's devices."""
    phases: Mapping[str, RankMemory]
    """What one of them holds while a role works, or while weights are published; without caches."""
    asleep: float
    """Bytes of host memory per device for what sleeps."""
    pool: float
    """Tokens that the caches of a lane may hold; 0 where nothing generates."""
    token: float
    """Bytes that a token of cache takes on one rank."""
    share: float | None = None
    """Of a device's memory what caches may take, where the native engine is to be told; none elsewhere."""

    @property
    def usable(self) -> float:
        """Bytes that a plan may use."""
        return memory.USABLE * self.device.memory

    @property
    def worst(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: self.phases[phase].total)

    @property
    def over(self) -> float:
        """Bytes by which the worst phase, or what sleeps, is too large; not above 0 where it fits."""
        most = max(held.total for held in self.phases.values())
        return max(most - self.usable, self.asleep - self.device.host_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """All sides of a choice."""

    sides: tuple[GroupMemory, ...]
    """In the order of their devices."""
    short: float
    """Tokens that a lane's caches lack for the longest answer; not above 0 where it fits."""

    @property
    def pool(self) -> float:
        """Tokens that the caches of a lane may hold."""
        return min(room.pool for room in self.sides if "generate" in room.side.roles)

    @property
    def share(self) -> float | None:
        """Of a device's memory what the caches of every lane may take; none where no engine is told."""
        return min((room.share for room in self.sides if room.share is not None), default=None)

    @property
    def fits(self) -> bool:
        """True if everything has room."""
        return self.short <= 0 and all(room.over <= 0 for room in self.sides)

    @property
    def over(self) -> float:
        """Bytes that are lacking on the device that lacks most."""
        lacking = max(room.over for room in self.sides)
        token = max(room.token for room in self.sides)
        return lacking if lacking > 0 else max(0.0, self.short * token)

    def why_not(self, longest: int) -> str:
        """What does not fit, by how much, and which part is the largest."""
        room = max(self.sides, key=lambda room: room.over)
        if room.over <= 0:
            return (
                f"caches hold {max(0, int(self.pool))} tokens beside everything else, and one answer with its prompt "
                f"may take {longest}"
            )
        if room.asleep - room.device.host_memory == room.over:
            asleep, there = room.asleep / GB, room.device.host_memory / GB
            return f"what sleeps takes {asleep:.0f} GB of host memory per device, and there are {there:.0f}"
        held = room.phases[room.worst]
        part, size = held.largest, getattr(held, held.largest) / GB
        return (
            f"{_phase(room.worst)} needs {held.total / GB:.1f} GB of the {room.usable / GB:.1f} GB that a device has "
            f"for it, {room.over / GB:.1f} GB too much; the largest part is {part} with {size:.1f} GB"
        )


def _phase(name: str) -> str:
    return {"generate": "generating", "train": "training", "fit": "training the critic", "publish": "publishing"}.get(
        name, f"the {name} stage"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedMemory:
    """A side as it is whatever the size of micro-batches, so that several sizes can be tried."""

    side: DeviceGroup
    """The devices, and the roles that they serve."""
    device: Device
    """As in `GroupMemory`, like `asleep` and `token`."""
    beside: Mapping[str, RankMemory]
    """Role -> what a device holds while it works, but for what the work itself takes."""
    publish: RankMemory | None
    """What it holds while weights are published; none if that is no phase of its own."""
    asleep: float
    free: float
    """Bytes that are left for caches while it generates."""
    token: float


class MemoryFits:
    """Memory by choice; what choices have in common is counted once."""

    def __init__(self, setting: PlanningProblem) -> None:
        self.setting = setting
        self.known: dict[object, RankMemory] = {}

    def room(self, choice: Candidate, still: tuple[FixedMemory, ...] | None = None) -> MemoryFit:
        """What a choice needs, and what is left for caches; `still` is its own, if that is known already."""
        sides = tuple(self._side(choice, side) for side in still or self.still(choice))
        lanes = [room.pool for room in sides if "generate" in room.side.roles]
        return MemoryFit(sides=sides, short=self.setting.workload.longest - min(lanes))

    def _side(self, choice: Candidate, still: FixedMemory) -> GroupMemory:
        side = still.side
        phases = {role: self._working(choice, side, role) + still.beside[role] for role in side.roles}
        if still.publish is not None:
            phases["publish"] = still.publish
        free, share = still.free, None
        if "generate" in side.roles and self._tells(still.device):
            share = self._share(choice, still, phases)
            free = share * still.device.memory
        pool = max(0.0, free * choice.lane.mesh.dp / still.token) if still.token else 0.0
        if pool and not still.device.kind.has_own_memory and not self.setting.workload.engine_apart:
            left = self._left_by_caches(choice, pool) * still.token
            for role in phases.keys() & {*UPDATE}:
                phases[role] += RankMemory(cache=min(left, phases[role].activations))
        return GroupMemory(
            side=side,
            device=still.device,
            phases=phases,
            asleep=still.asleep,
            pool=pool,
            token=still.token,
            share=share,
        )

    def _left_by_caches(self, choice: Candidate, pool: float) -> float:
        """Tokens whose caches a CPU's heap still has room for while it trains: freed, but in pieces that are smaller
        than activations, which come on top."""
        work = self.setting.workload
        return min(pool, work.answers / choice.lanes(work.roles) * work.longest) / choice.lane.mesh.dp

    def _tells(self, device: Device) -> bool:
        """Whether a plan says what share of such a device the native engine may take, as the recipe does not."""
        work = self.setting.workload
        return not work.paged and work.share is None and device.kind.has_own_memory

    def _share(self, choice: Candidate, still: FixedMemory, phases: Mapping[str, RankMemory]) -> float:
        """What every phase leaves, because caches stay where they are while others work, unless they sleep; and as much
        as an engine takes that is told nothing, if that has room while it generates: others then ask it to leave."""
        memory_of = still.device.memory
        moves = choice.sleeps and not choice.streamed
        most = max(held.total for role, held in phases.items() if role == "generate" or not moves)
        left = memory.USABLE - most / memory_of
        return max(0.0, math.floor(1000 * max(left, min(CACHE_SHARE, still.free / memory_of))) / 1000)

    def still(self, choice: Candidate) -> tuple[FixedMemory, ...]:
        """What all choices have in common that differ from this one in their micro-batches and recomputing alone."""
        return tuple(self._still(choice, side) for side in choice.sides(self.setting.workload.roles))

    def _still(self, choice: Candidate, side: DeviceGroup) -> FixedMemory:
        work, costs = self.setting.workload, self.setting.costs
        device = self.setting.weakest(side.first, side.size)
        sources = {role: choice.source(role, work) for role in side.roles}
        resident = {role: self._resident(choice, side, role, sources[role]) for role in side.roles}
        waiting = NOTHING
        if choice.sleeps and choice.streamed:  # optimizers leave their memory to caches until the update
            waiting = RankMemory(optimizer=math.fsum(held.optimizer for held in resident.values()))
            resident = {role: held._replace(optimizer=0.0) for role, held in resident.items()}
        moves = choice.sleeps and not choice.streamed
        if not moves and self._shares_base(choice, side):
            site, precision = self._site(choice, side, "fit"), work.precision_of("fit")
            own = memory.weights(work.shapes["fit"], site, precision)
            resident["fit"] = resident["fit"]._replace(weights=resident["fit"].weights - own)
        apart = work.engine_apart and "generate" in side.roles
        process = RankMemory(context=memory.context_of(device, work.base) + (memory.CONTEXT if apart else 0.0))
        always = process if moves else sum(resident.values(), process)
        gathered = self._gathered(choice, side) if sources.get("generate") == "gather" else NOTHING
        if choice.streamed:  # generating and training take turns, too often to gather anew
            always += gathered
        beside, reads = {}, always if choice.streamed else always + gathered
        for phase in side.roles:
            beside[phase] = always if phase == "train" and device.kind.has_own_memory else reads
            for role in side.roles if moves else ():
                beside[phase] += self._kept(role, phase, sources, resident[role])
        if "generate" in side.roles and not apart and not device.kind.has_own_memory:
            shape, site = work.shapes["generate"], self._site(choice, side, "generate")
            copies = RankMemory(gathered=memory.ordered(shape, site, work.precision_of("generate"), work.precision))
            for phase in side.roles if work.adapter else ("generate",):  # those of what never changes stay
                beside[phase] += copies
        # While weights are handed over, who generates and who trains is awake.
        awake = sum((resident[role] for role in ("generate", "train") if moves and role in resident), always) + waiting
        publish = None if waiting is NOTHING else awake
        if sources.get("generate") == "own":
            site = self._site(choice, side, "generate")
            bucket = 0.0 if work.adapter else memory.handover(work.shapes["generate"], site)
            publish = awake + RankMemory(gathered=bucket)
        if "train" in side.roles and choice.copied(work.roles):
            publish = (publish or awake) + RankMemory(gradients=resident["train"].gradients)
        sleeping = [held for role, held in resident.items() if len(side.roles) > 1] if moves else []
        sleeping += [] if waiting is NOTHING else [waiting]
        free = token = 0.0
        if "generate" in side.roles:
            site = self._site(choice, side, "generate")
            token = costs.cache_bytes(work.shapes["generate"], site, 1.0, work.precision)
            free = memory.USABLE * device.memory - (self._working(choice, side, "generate") + beside["generate"]).total
            share = work.share
            if share is None and not work.paged and not self._tells(device):
                share = CACHE_SHARE
            free = free if share is None else min(free, share * device.memory)
        return FixedMemory(
            side=side,
            device=device,
            beside=beside,
            publish=publish,
            asleep=memory.asleep(sleeping, 1) if sleeping else 0.0,
            free=free,
            token=token,
        )

    def alone(self, choice: Candidate, side: DeviceGroup, role: str) -> tuple[float, float]:
        """Bytes that a role holds on its devices while it does nothing, and what it needs besides while it works."""
        resident = self._resident(choice, side, role, "own")
        return resident.total, self._working(choice, side, role).total

    def _site(self, choice: Candidate, side: DeviceGroup, role: str) -> Site:
        return self.setting.site(choice.split(role, self.setting.workload.reading), side.first, side.size)

    def _shares_base(self, choice: Candidate, side: DeviceGroup) -> bool:
        """True if a critic's adapter sits on the whole base that lies here for the policy."""
        work = self.setting.workload
        splits = {choice.split(role, work.reading).width for role in UPDATE if role in side.roles}
        return work.critic_shares and {*UPDATE} <= {*side.roles} and splits == {1}

    def _kept(self, role: str, phase: str, sources: Mapping[str, Source], resident: RankMemory) -> RankMemory:
        """What of a role that may sleep stays on the device while another works."""
        if role == phase:
            return resident
        update = "fit" if phase == "value" else "train"
        read = role == update and sources[phase] != "own"
        return RankMemory(weights=resident.weights) if read else NOTHING

    def _resident(self, choice: Candidate, side: DeviceGroup, role: str, source: Source) -> RankMemory:
        """What a role holds even while it does nothing."""
        split, copies = choice.split(role, self.setting.workload.reading), 1
        if choice.sharded and role in UPDATE:
            _, count = choice.places(self.setting.workload.roles)[role]
            copies = count // split.width
        whitens = choice.whitens(self.setting.workload)
        key = ("resident", role, split, source, copies, side.first, side.size, whitens)
        if key not in self.known:
            self.known[key] = self._count_resident(choice, side, role, source, copies)
        return self.known[key]

    def _count_resident(
        self, choice: Candidate, side: DeviceGroup, role: str, source: Source, copies: int
    ) -> RankMemory:
        work, site = self.setting.workload, self._site(choice, side, role)
        shape = work.shapes[role]
        if role in UPDATE:
            base = work.precision_of(role)
            adapter, optimizer = work.adapter_of(role), work.optimizer_of(role)
            held = memory.states(shape, site, adapter=adapter, base=base, optimizer=optimizer)
            sums = 2 if role == "train" and choice.whitens(work) else 1
            return held._replace(optimizer=held.optimizer / copies, gradients=held.gradients * sums)
        if source != "own":
            return NOTHING
        if role == "generate":
            return RankMemory(weights=memory.generating(shape, site, 0.0, precision=work.precision_of(role)).weights)
        return RankMemory(weights=memory.weights(shape, site, work.precision_of(role)))

    def _gathered(self, choice: Candidate, side: DeviceGroup) -> RankMemory:
        """The weights that an engine reads and its device trains only a part of."""
        key = ("gathered", choice.lane, choice.train, side.first, side.size)
        if key not in self.known:
            work, site = self.setting.workload, self._site(choice, side, "generate")
            shape, precision = work.shapes["generate"], work.precision_of("generate")
            self.known[key] = RankMemory(weights=memory.generating(shape, site, 0.0, precision=precision).weights)
        return self.known[key]

    def _working(self, choice: Candidate, side: DeviceGroup, role: str) -> RankMemory:
        """What a role needs besides while it works."""
        split = choice.split(role, self.setting.workload.reading)
        budget = 0 if role == "generate" else choice.budget
        key = ("working", role, split, budget, choice.recompute, side.first, side.size)
        if key not in self.known:
            self.known[key] = self._count_working(choice, side, role)
        return self.known[key]

    def _count_working(self, choice: Candidate, side: DeviceGroup, role: str) -> RankMemory:
        work, site = self.setting.workload, self._site(choice, side, role)
        shape = work.shapes[role]
        if role in UPDATE:
            kind: memory.Activations = "recompute" if choice.recompute else "keep"
            return RankMemory(
                activations=memory.activations(shape, site, choice.budget, kind, work.precision),
                head=self._head(choice, site) if role == "train" else 0.0,
                gathered=memory.gathered(shape, site, trained=not work.adapter_of(role))
                + memory.widened(shape, site, work.precision_of(role)),
            )
        if role == "generate":
            held = memory.generating(shape, site, 0.0, precision=work.precision_of(role))
            return RankMemory(activations=held.activations, gathered=held.gathered)
        scoring = memory.scoring(shape, site, choice.budget, precision=work.precision)
        wide = scoring.gathered + memory.widened(shape, site, work.precision_of(role))
        return scoring._replace(weights=0.0, context=0.0, gathered=wide)

    def _head(self, choice: Candidate, site: Site) -> float:
        """What the policy's head needs while it is trained."""
        work = self.setting.workload
        return memory.head(
            work.shapes["train"], site, choice.budget, trained=not work.adapter, precision=work.precision
        )
