"""What published systems do to hand new weights from trainers to engines, and what that takes by its parts.

A system's way is known from its documentation; a row names it in its `strategy`. Layouts come from the row's own
mapping ("EP8 DP2 -> TP2 DP8") or its columns. Three constants of `Rates` belong to engines of their own and are fitted
on these rows (`CONSTANTS`); wires and caches are those of everything else.
"""

from __future__ import annotations

from dataclasses import replace

from cases import Case, Row, family

from stretto.placement.transport import TensorPath
from stretto.planner.cost.mesh import Site
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.transfers import Handover, WeightRoute, hand_over

CONSTANTS = ("tensor", "load", "handover")
"""Seconds per tensor, per call of a loader and per hand-over."""
LARGE = 4 * 2.0**30
"""Bytes of a bucket, where systems have such: 2 to 8 GiB are published."""

PACKED = WeightRoute(
    path=TensorPath.NCCL, whole=True, bucket=LARGE, overlapped=True, exports=True, loads=True
)  # fmt: skip
"""Two buffers in turns: a trainer fills one while the other goes round."""
ROUTES: tuple[tuple[str, str, WeightRoute], ...] = (
    ("verl", "checkpoint-engine off", replace(PACKED, bucket=0.0, overlapped=False)),
    ("verl", "checkpoint-engine on", replace(PACKED, overlapped=False, staged=2)),
    ("NeMo-RL", "NCCL M-to-N reshard", replace(PACKED, gathers=False, whole=False, paired=True, stacked=True)),
    ("NeMo-RL", "full experts", replace(PACKED, paired=True)),
    ("NeMo-RL", "NIXL", replace(PACKED, whole=False, paired=True)),
)
"""System, words of the row's strategy -> what it does; the first that fits."""
COLOCATED = replace(PACKED, path=TensorPath.IPC, overlapped=False)
"""An engine on the trainer's own devices: buckets pass through the memory of the card."""


def route_of(row: Row) -> WeightRoute:
    """What the row's system does."""
    for system, words, route in ROUTES:
        if family(row) == system and words in row["strategy"]:
            return route
    return PACKED if row["strategy_id"] in ("separate", "sync_transfer") else COLOCATED


def handed_over(case: Case, costs: Costs) -> Handover:
    """The parts of a hand-over."""
    route = route_of(case.row)
    receivers = case.lanes * case.engine.mesh.devices
    engine = Site(device=case.engine.device, mesh=replace(case.engine.mesh, devices=receivers))
    return hand_over(
        costs, route, case.shape, case.trainer, engine, receivers=receivers, crosses=case.separate,
        adapter=case.adapter, precision=case.precision,
    )  # fmt: skip
