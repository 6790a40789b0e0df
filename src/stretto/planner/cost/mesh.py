"""How the ranks of one cell divide a model and its batch between them.

Only the degrees; which devices they are is the plan's business (`plan.Cell`), what a degree costs is `cost`'s and
`memory`'s. Tensor parallel ranks lie next to each other, then context parallel, then data parallel; pipeline stages
are furthest apart. This is the order that Megatron-LM uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from stretto.placement.devices import Device


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Degrees of parallelism of one cell. What follows from them is worked out once, as everything else is asked
    for with it."""

    devices: int = 1
    """Ranks in all."""
    tp: int = 1
    """Tensor parallel: ranks that share every matrix."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Context parallel: ranks that share a sequence."""
    ep: int = 1
    """Expert parallel: ranks over which the experts of a layer are spread."""
    zero: int = 0
    """What data parallel ranks shard: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too (FSDP)."""
    stages: int = 1
    """Slices of the model that one pipeline rank holds (interleaved schedule)."""
    cuts_all: bool = True
    """Tensor parallel ranks share embedding, head and states between layers too, as in Megatron-LM. Those of our own
    cells have them in full (`models.tensor_parallel`)."""

    @cached_property
    def model(self) -> int:
        """Ranks that hold one copy of the layers' matrices."""
        return self.tp * self.pp

    @cached_property
    def uncut(self) -> int:
        """Ranks that hold one copy of what `cuts_all` is about."""
        return self.model if self.cuts_all else self.pp

    @cached_property
    def dp(self) -> int:
        """Copies that work on different sequences."""
        return max(1, self.devices // (self.tp * self.pp * self.cp))

    @cached_property
    def sharding(self) -> int:
        """Ranks that hold the same part of a model, over which its state may be sharded."""
        return max(1, self.devices // self.model)

    @cached_property
    def expert_copies(self) -> int:
        """Ranks that hold the same experts. Experts are not split by tensor parallelism."""
        return max(1, self.devices // (self.pp * self.ep))

    @property
    def gathers(self) -> bool:
        """True of an engine whose ranks hold shards and gather each layer at every token. Ranks over which experts are
        spread hold everything else whole."""
        return self.zero == 3 and self.ep == 1 and self.sharding > 1

    def same_experts(self, other: Mesh) -> bool:
        """True if each rank holds the very experts that it would hold under the other: all spread over all ranks."""
        return self.ep > 1 and (self.devices, self.pp, self.ep) == (other.devices, other.pp, other.ep) == (
            self.pp * self.ep, self.pp, self.ep,
        )  # fmt: skip

    @classmethod
    def of_mesh(cls, mesh: Mapping[str, int], devices: int) -> Mesh:
        """From the mesh of a cell of ours: `dp_shard` above 1 is FSDP."""
        shard = mesh.get("dp_shard", 1)
        degrees = {key: mesh.get(key, 1) for key in ("tp", "pp", "ep", "cp")}
        return cls(devices=devices, zero=3 if shard > 1 else 0, cuts_all=False, **degrees)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A mesh on devices of one kind: what costs are asked for."""

    device: Device
    """What each rank runs on."""
    mesh: Mesh = Mesh()
    """How they share the work."""
    per_host: int = 0
    """Ranks of this cell on one host; 0 for as many as a usual host has."""

    @property
    def joined(self) -> int:
        """Ranks on one host that a link joins, or of one rack where the link spans hosts."""
        if self.device.domain > self.device.per_host:
            return self.device.domain
        return min(self.per_host or self.device.per_host, self.device.domain)

    @property
    def on_host(self) -> int:
        """Ranks that one host has room for."""
        return self.per_host or self.device.per_host
