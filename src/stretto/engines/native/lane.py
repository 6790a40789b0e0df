"""One of several devices that generate together: each computes its part of every layer, and all take the same steps.

Every rank of a lane runs an engine of its own over the same requests: it is given the same calls in the same order, and
what it decides follows from counts and tokens alone, which are the same everywhere. What would not be, the first rank
tells: the tokens that were drawn, and whether the seconds of a round are over. So ranks never decode different batches,
however their clocks differ and their arithmetic rounds.

What each layer's parts add up to, the modules of the cut model ask for while they compute, through the same link. Where
experts are spread over more ranks than share a matrix, those that share them are one of several such teams
(`spread_lane`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.engines.native.batch import DecodeBatch
from stretto.engines.native.decode_backend import Steps
from stretto.engines.native.engine import NativeEngine
from stretto.engines.native.truncation import Truncation
from stretto.errors import EngineError
from stretto.models.load import Policy
from stretto.types import Receipt, Weights
from stretto.weights.tensors import checksums, same_bits

FIRST = 0
"""The rank whose word is everybody's."""


class LaneGroup(Protocol):
    """The ranks of a lane, once they have met. All of them call the same, in the same order."""

    def add_ahead(self, tensor: Tensor) -> None:
        """Makes a tensor the sum of every rank's, for whatever is computed after it."""
        ...

    def settle(self) -> None:
        """Waits for what was added up ahead."""
        ...

    def hand_round(self, tensor: Tensor, *, source: int) -> None:
        """Makes a tensor that of rank `source`."""
        ...

    def exchange(self, rows: Tensor) -> Tensor:
        """Row i is what rank i has sent to this one; row i of `rows` goes to rank i."""
        ...

    def gather_ahead(self, rows: Tensor) -> Tensor:
        """Every rank's rows, of which all have equally many, rank after rank, for whatever is computed after it."""
        ...

    def among(self, members: Sequence[int]) -> LaneGroup:
        """Some of the ranks, this one among them, which meet now."""
        ...


class LaneLink:
    """One rank's way to the others. Modules keep it, while groups come and go with the processes behind them."""

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.group: LaneGroup | None = None
        self.rows: list[int] = []  # how many rows each rank has in the forward under way

    def add(self, tensor: Tensor) -> None:
        """Makes a tensor the sum of every rank's."""
        self._met().add_ahead(tensor)

    def gather(self, rows: Tensor) -> Tensor:
        """Every rank's rows, of which all have equally many, rank after rank."""
        return self._met().gather_ahead(rows)

    def settle(self) -> None:
        """Waits for these sums, where one may have died who has a part in them."""
        self._met().settle()

    def told(self, tensor: Tensor) -> Tensor:
        """The first rank's tensor, in place of this one's."""
        if self.size > 1:
            self._met().hand_round(tensor, source=FIRST)
        return tensor

    def numbers(self, number: int) -> list[int]:
        """Every rank's number."""
        mine = torch.full((self.size, 1), number, dtype=torch.long)
        found: list[int] = self._met().exchange(mine).flatten().tolist()
        return found

    def _met(self) -> LaneGroup:
        if self.group is None:
            raise EngineError(f"rank {self.rank} of a lane of {self.size} is on its own: the others have not met it")
        return self.group


class LaneLinks:
    """A rank's ways to those that share its matrices, a team, and to the others."""

    def __init__(self, *, rank: int, size: int, team: int) -> None:
        """Teams are of `team` ranks, one after the other."""
        self.everybody = LaneLink(rank=rank, size=size)
        self.team = self.everybody if team == size else LaneLink(rank=rank % team, size=team)
        self.others = LaneLink(rank=rank // team, size=size // team)  # the rank of every team that has the same parts

    def meet(self, group: LaneGroup | None) -> None:
        """Goes on with these ranks, or on its own."""
        self.everybody.group = group
        rank, size, team = self.everybody.rank, self.everybody.size, self.team.size
        first = rank - rank % team
        for link, members in ((self.team, range(first, first + team)), (self.others, range(rank % team, size, team))):
            if link is not self.everybody:
                link.group = group.among(members) if group is not None and link.size > 1 else None

    def settle(self) -> None:
        """Waits for all sums."""
        for link in {self.everybody, self.team, self.others}:
            if link.size > 1:
                link.settle()

    def any(self, told: bool) -> bool:
        """Whether some rank says so."""
        return any(self.numbers(told))

    def numbers(self, number: int) -> list[int]:
        """Every rank's number. Waits for all sums, where one may have died who has a part in them."""
        self.settle()
        return self.everybody.numbers(number)


class LaneSteps(Steps):
    """Computes a rank's part of every step as it comes."""

    def __init__(self, policy: Policy, links: LaneLinks) -> None:
        super().__init__(policy)
        self.links = links

    def draw(self, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """As `Steps`, in the first rank's words."""
        self.links.settle()
        tokens, logprobs = self._told(*super().draw(batch))
        return tokens, logprobs

    def draw_kept(self, batch: DecodeBatch, truncation: Truncation) -> tuple[Tensor, Tensor, Tensor]:
        """As `Steps`, in the first rank's words."""
        self.links.settle()
        tokens, logprobs, ids = self._told(*super().draw_kept(batch, truncation))
        return tokens, logprobs, ids

    def over(self, late: bool) -> bool:
        """Whether the first rank's clock says so."""
        self.links.settle()
        return bool(self.links.team.told(torch.tensor([late], dtype=torch.uint8, device=self.policy.device)))

    def _told(self, *found: Tensor) -> Iterator[Tensor]:
        """These tensors of the first rank's, which travel as one: the ids of tokens are exact in fp64."""
        flat = self.links.team.told(torch.cat([each.double().flatten() for each in found]))
        parts = flat.split([each.numel() for each in found])
        return (part.view_as(each).to(each.dtype) for part, each in zip(parts, found, strict=True))


class LaneEngine(NativeEngine):
    """Generates with a part of every matrix, beside the other ranks of its lane.

    Unlike the engine of one device it has weights of its own: the parts, cut anew from the whole policy in the same
    process with every version, and held against that when they are proved.
    """

    def __init__(
        self,
        whole: Policy,
        cut: Policy,
        part: Callable[[str, Tensor], Tensor],
        links: LaneLinks,
        *,
        heads: int,
        **choices: Any,
    ) -> None:
        """`cut` is the policy whose modules have parts and add up through the `links`; `part` is what this rank has of
        a parameter, and of its keys and values one of `heads`."""
        super().__init__(cut, steps=LaneSteps(cut, links), **choices)
        self.whole, self.part, self.links = whole, part, links
        self.own_tokens = self.kv_tokens = self.kv_tokens * heads

    def meet(self, group: LaneGroup) -> None:
        """Begins anew with these ranks: whoever has come in another's place knows nothing of what was decoded before.

        They admit alike, by the cache of whoever has the least room.
        """
        self.close()
        self.links.meet(group)
        self.kv_tokens = min(self.links.everybody.numbers(self.own_tokens))

    def part_from_others(self) -> None:
        """Leaves a lane in which something has failed, and forgets what was under way: nobody can go on with it."""
        self.links.meet(None)
        self.close()

    def receive(self, weights: Weights) -> Receipt:
        """Takes over a version: its parts of what the policy of its process has by now."""
        held = self.policy.trained()
        with torch.no_grad():
            for name, full in self.whole.trained().items():
                held[name].copy_(self.part(name, full.detach()))
        return super().receive(weights)

    def holds(self) -> Receipt:
        """The version of the weights, of which it has copies."""
        return Receipt(version=self.version, manifest={}, shared=False)

    def checksums(self, names: Collection[str]) -> dict[str, str]:
        """Those of whole tensors whose parts it has, to the bit; a tensor of which it has something else is told with
        no checksum, and so is one that is trained and was not asked for."""
        full, held = tensors_of(self.whole), tensors_of(self.policy)
        asked = {*names, *self.whole.trained()}
        spoiled = {name for name in asked & full.keys() if not self._has(name, full[name], held[name])}
        told = checksums((name, full[name]) for name in names if name in full)
        return told | dict.fromkeys(spoiled, "another part")

    def _has(self, name: str, full: Tensor, held: Tensor) -> bool:
        part = self.part(name, full.detach())
        return held.shape == part.shape and same_bits(held, part.to(held.device))

    def tensors(self) -> Iterator[Tensor]:
        """What it holds beside the whole policy."""
        shared = {tensor.data_ptr() for tensor in tensors_of(self.whole).values()}
        return (held for held in self.policy.network.parameters() if held.data_ptr() not in shared)


def tensors_of(policy: Policy) -> dict[str, Tensor]:
    """Every parameter and buffer of a policy, by name."""
    return {**dict(policy.network.named_parameters()), **dict(policy.network.named_buffers())}
