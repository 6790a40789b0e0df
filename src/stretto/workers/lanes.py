"""A worker's part in generating: alone, or as one of the processes of a lane, each with a part of the model.

A lane is a cell of several devices that generates. Those of its processes that share every matrix, a team, are asked
the same at the same time (`lane_calls`) and answer in step; the first one's answer is the team's. There are several
teams where experts are spread wider. Where something fails in a process it leaves the others, which would wait for it:
they notice, and leave too. All of them begin anew when they are told to meet again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.engines.base import Engine
from stretto.engines.native.lane import FIRST, LaneEngine, LaneLink, LaneLinks
from stretto.engines.native.spread_lane import SpreadLaneEngine
from stretto.engines.native.truncation import Truncation
from stretto.errors import RecipeError
from stretto.models.cut_collectives import ALONE, Ranks
from stretto.models.load import Policy
from stretto.models.tensor_parallel import cut_network
from stretto.recipe.schema import NativeEngineSection
from stretto.workers.api import LANE
from stretto.workers.offload import HeldStorages, HostBuffer, Offloader
from stretto.workers.process_group import ProcessGroup
from stretto.workers.worker_spec import LaneSpec, WorkerSpec


@dataclass(frozen=True, slots=True)
class LinkedRanks(Ranks):
    """The processes at the other end of a link, behind which groups come and go."""

    def add(self, tensor: Tensor) -> None:
        """Makes a tensor the sum of everybody's."""
        self.group.add(tensor)

    def gather(self, rows: Tensor) -> Sequence[Tensor]:
        """Everybody's rows, of which all have equally many."""
        found: Tensor = self.group.gather(rows)
        return found.chunk(self.size)

    def rows_of_each(self, rows: Tensor) -> list[int]:
        """How many rows everybody has, as was told when the forward began: no device waits for it in every layer."""
        counts: list[int] = self.group.rows
        return counts


def linked(link: LaneLink) -> Ranks:
    """Those whom a link reaches."""
    return LinkedRanks(link.rank, link.size, link) if link.size > 1 else ALONE


def lane_engine(policy: Policy, section: NativeEngineSection, lane: LaneSpec, device: torch.device) -> LaneEngine:
    """What generates on a device with a part of the policy; the policy itself stays whole."""
    if policy.apart:
        reason = f"{lane.cell} has {lane.size} devices, and this model's layers cannot be given packed rows"
        raise RecipeError.of("placement.cells", reason, "give each generate cell one device")
    from stretto.training.parallel.fsdp import on_the_same_tensors  # what it needs of torch takes seconds to load

    links = LaneLinks(rank=lane.rank, size=lane.size, team=lane.team)
    mine = on_the_same_tensors(policy)
    others = linked(links.others) if lane.spreads else None
    cut = cut_network(mine.network, tensor=linked(links.team), experts=others)
    mine.network.to(device)
    kind = LaneEngine if lane.team == lane.size else SpreadLaneEngine
    return kind(
        policy,
        mine,
        cut.part,
        links,
        heads=cut.heads,
        memory_share=section.memory_share,
        speculate=section.speculate,
        truncation=Truncation(top_p=section.top_p, top_k=section.top_k),
    )


class LaneMember:
    """The part of a worker that generates together with others, if it does."""

    assignment: WorkerSpec
    engine: Engine
    sleepers: Offloader
    groups: dict[str, ProcessGroup]

    @property
    def speaks(self) -> bool:
        """Whether it answers for its cell, or for its team there."""
        lane = self.assignment.lane
        return lane is None or lane.rank % lane.team == FIRST

    def let_parts_sleep(self, host_buffer: HostBuffer) -> None:
        """Its parts of the model leave the device where its cell may sleep."""
        if isinstance(self.engine, LaneEngine):
            self.sleepers.add(HeldStorages({"generate"}, self.engine.tensors, host_buffer))

    def met(self, kind: str) -> None:
        """Its engine goes on with those that generate together with it, if it is these that were met."""
        if kind.startswith(LANE) and isinstance(self.engine, LaneEngine):
            self.engine.meet(self.groups[kind])

    @contextmanager
    def in_lane(self) -> Iterator[None]:
        """Where others wait for it. If something fails in here, it leaves, so that they need not wait any longer."""
        try:
            yield
        except BaseException:
            if isinstance(self.engine, LaneEngine):
                self.engine.part_from_others()
            for kind in [kind for kind in self.groups if kind.startswith(LANE)]:
                self.groups.pop(kind).close()
            raise
