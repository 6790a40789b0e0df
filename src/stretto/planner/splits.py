"""How a cell may divide a model: matrices inside a link domain, shards, pipelines between hosts, experts.

Rules only; nothing is priced here, and nothing is asked about memory.
"""

from __future__ import annotations

from stretto.planner.cost.shapes import ModelShape
from stretto.planner.problem import ModelSplit, PlanningProblem

WIDTHS = (1, 2, 4, 8, 16)
"""Ranks that may share a matrix."""
EXPERT_RANKS = (64, 32, 16, 8, 4, 2)
"""Ranks over which experts may be spread."""
PIPELINES = (2, 4)
"""Stages of a pipeline, between hosts."""


class Splits:
    """Ways to divide the models of a setting over so many devices, `host` of which share a host."""

    def __init__(self, setting: PlanningProblem) -> None:
        self.setting = setting

    def lanes(self, count: int, host: int) -> list[ModelSplit]:
        """Cells that generate: matrices cut inside a link domain, experts spread over several ranks."""
        shape = self.setting.workload.shapes["generate"]
        whole = [ModelSplit(tp=tp) for tp in self._widths(shape, count, host)]
        found, widest = list(whole), whole[-1].tp
        if count > host:
            found += [
                ModelSplit(tp=widest, pp=pp) for pp in PIPELINES if not count % (widest * pp) and not shape.layers % pp
            ]
        if shape.experts:
            spread = [n for n in EXPERT_RANKS if not count % n and not shape.experts % n]
            found += [ModelSplit(tp=lane.tp, dp=n // lane.tp, ep=n) for n in spread for lane in whole if n > lane.tp]
        return found

    def trains(self, count: int, host: int, role: str = "train") -> list[ModelSplit]:
        """Cells that train: shards, cut matrices, both; pipelines and spread experts where the model asks for them."""
        shape, found = self.setting.workload.shapes[role], []
        for tp in self._widths(shape, count, host):
            found += [ModelSplit(tp=tp, dp=dp) for dp in self._copies(count // tp, host)]
            if count > host:
                found += [
                    ModelSplit(tp=tp, pp=pp) for pp in PIPELINES if not count % (tp * pp) and not shape.layers % pp
                ]
        if shape.experts:
            for split in list(found):
                spread = [n for n in EXPERT_RANKS if split.pp == 1 and not split.width % n and not shape.experts % n]
                found += [split._replace(ep=n) for n in spread[:2]]
        return found

    def frozen(self, count: int, host: int) -> list[ModelSplit]:
        """Cells of frozen models: each a whole copy, or as few shards as there may be."""
        return [ModelSplit(dp=dp) for dp in self._copies(count, host)][:5]

    def _widths(self, shape: ModelShape, count: int, host: int) -> list[int]:
        device = self.setting.weakest(0, len(self.setting.names))
        domain = device.domain
        most = domain if domain > device.per_host else min(domain, host)
        return [tp for tp in WIDTHS if tp <= most and not count % tp and not shape.heads % tp]

    def _copies(self, count: int, host: int) -> list[int]:
        """Over how many ranks weights may be sharded: powers of two, whole hosts, all."""
        found = [2**i for i in range(20)] + [host * 2**i for i in range(20)] + [count]
        return sorted({ranks for ranks in found if ranks <= count and not count % ranks})
