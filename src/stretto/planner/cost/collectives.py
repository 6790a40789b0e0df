"""Seconds that messages between ranks take: latency plus bytes over bandwidth, inside a link domain and beyond it.

The alpha-beta model of collective operations (Thakur, Rabenseifner and Gropp 2005) in the hierarchical form that NCCL
uses: reduce inside a domain, exchange between domains on one share each, gather inside. Bandwidth is that of one
device in one direction, less what protocols cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stretto.placement.rates import Rates
from stretto.planner.cost.mesh import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """The group of ranks that exchange something, as the network sees it."""

    near: int
    """Ranks that a fast link joins."""
    far: int
    """How many such domains the group spans."""
    near_rate: float
    """Bytes/s of the link, as achieved."""
    far_rate: float
    """Bytes/s of the network, as achieved."""
    near_delay: float
    """Seconds of one hop inside a host."""
    far_delay: float
    """Seconds of one hop between hosts."""

    @classmethod
    def between(cls, site: Site, ranks: int, *, stride: int = 1, rates: Rates) -> Wires:
        """A group of this many ranks of a cell, each `stride` after the one before."""
        ranks, joined = max(1, ranks), max(1, site.joined)
        near = max(1, min(ranks, joined // min(stride, joined)))
        # Ranks of a group that does not fill a domain share its network cards with the other groups beside it.
        crosses_hosts = ranks * stride > site.on_host
        return cls(
            near=near,
            far=-(-ranks // near),
            near_rate=site.device.link * rates.link_share,
            far_rate=site.device.nic * rates.nic_share,
            near_delay=rates.far_delay if crosses_hosts and near > 1 else rates.near_delay,
            far_delay=rates.far_delay,
        )

    def all_reduce(self, size: float) -> float:
        """Everyone ends with the sum of `size` bytes."""
        near = 2 * (self.near - 1) / self.near * size / self.near_rate
        far = 2 * (self.far - 1) / self.far * size / self.near / self.far_rate
        return near + far + 2 * self._hops()

    def all_gather(self, size: float) -> float:
        """Everyone ends with `size` bytes, of which each rank had its share. A reduce-scatter costs the same."""
        near = (self.near - 1) / self.near * size / self.near_rate
        far = (self.far - 1) / self.far * size / self.near / self.far_rate
        return near + far + self._hops()

    def all_to_all(self, size: float, copies: float = 1.0) -> float:
        """Each rank sends every vector of its `size` bytes to as many ranks as it has `copies`, picked evenly.

        Between domains a vector travels once per domain that wants it, and is copied there (DeepSeek-V3, 2024).
        """
        remote = (self.far - 1) * (1 - math.pow(1 - 1 / self.far, copies))
        near = size * copies * (self.near - 1) / self.near / self.near_rate
        return near + size * remote / self.far_rate + self._hops()

    def broadcast(self, size: float, part: float) -> float:
        """`size` bytes to every host of the group, of which each rank takes in this part: a pipeline, as slow as its
        slowest link. All cards of a host take in what it needs together, and hand it on inside."""
        remote = min(part, size / self.near) if self.far > 1 else 0.0
        return max(remote / self.far_rate, (part - remote) / self.near_rate) + self._hops()

    def fetch(self, size: float) -> float:
        """Every rank takes in `size` bytes that it lacks, evenly from the others."""
        ranks = self.near * self.far
        return self.all_gather(size * ranks / (ranks - 1)) if ranks > 1 else 0.0

    def send(self, size: float) -> float:
        """One rank to one other, in the next domain if there is one."""
        if self.far > 1:
            return self.far_delay + size / self.far_rate
        return self.near_delay + size / self.near_rate if self.near > 1 else 0.0

    def _hops(self) -> float:
        """Latency of a tree over each level; nothing for a group of one."""
        return self.near_delay * math.ceil(math.log2(self.near)) + self.far_delay * math.ceil(math.log2(self.far))
