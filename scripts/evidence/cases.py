"""Published measurements (benchmarks/planner_cases.csv) as questions to the cost model: which row says enough, and what
the row's system is known to do in every step.

Nothing here belongs to a single row. A row states its sizes; `SYSTEMS` says what a system does in all of its rows. A
row that is only good for the sign of a comparison may leave its lengths open; then they are assumed, the same for all.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.errors import RecipeError
from stretto.placement.devices import find_device
from stretto.placement.rates import Rates
from stretto.planner.cost import memory
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.mesh import Mesh, Site
from stretto.planner.cost.precision import Precision
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import ModelShape, named_shape

CASES = Path(__file__).resolve().parents[2] / "benchmarks" / "planner_cases.csv"
SIGMA = 1.0
"""Spread of log-length where a row states only a mean: what the published tails of reasoning models have."""
OPEN_PROMPT, OPEN_BATCH, OPEN_CAP = 512.0, 8192, 8192
"""What a comparison is posed with where its rows leave it open."""
OPEN_MEAN, OPEN_MEAN_REASONING = 0.06, 0.5
"""The mean as a share of the cap there: what is published of models that reason at length (distilled) and of others."""

PUBLISHED = Rates(phase=0.5)
"""Constants of the systems that published: a change of stage takes them half a second and more, because engines sleep
and wake, data goes through a controller, and weights go to other processes. Plans of this project know no such number.
"""

FP8_GAIN = 1.6
"""How much faster than in bf16 large products in fp8 are."""


def costs_of(rates: Rates) -> Costs:
    """The cost model for what others published, whose systems compute in fp8 where they store weights so."""
    return Costs(rates=rates, widens=False, fp8_gain=FP8_GAIN)


WEIGHTS_ALONE = {
    "qwen3.5-397b-a17b": ModelShape(
        name="qwen3.5-397b-a17b", layers=60, hidden=4096, heads=32, kv_heads=2, head_dim=256, ffn=1024, vocab=248_320,
        experts=512, top_k=10, expert_ffn=1024, shared_experts=1,
    )
}  # fmt: skip
"""Models whose attention is not modeled: good for the sizes of their weights only."""

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What a system does in every step."""

    reference: bool = False
    """Computes log-probabilities under a reference model."""
    share: float = 0.6
    """Of the memory, what an engine takes beside a trainer."""
    alone: float = 0.85
    """The same where the engine has devices of its own."""
    slots: int = 1024
    """Most requests of an engine at a time."""
    fsdp: bool = False
    """Shards weights over all ranks where a row states no layout."""
    recompute: bool = True
    """Recomputes activations in the backward, as recipes for long answers do."""
    interrupts: bool = False
    """Asynchronous, it lets answers go on under new weights and trains on the engine's own log-probabilities."""


SYSTEMS = {
    "NeMo-RL": System(reference=True),
    "verl": System(fsdp=True, interrupts=True),
    "AReaL": System(interrupts=True),
    "prime-rl": System(fsdp=True),
}
"""By the first word of a system's name; what is not here does what most do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row, posed."""

    row: Row
    """As published."""
    shape: ModelShape
    """The model."""
    trainer: Site
    """Where it trains."""
    engine: Site
    """One lane that generates."""
    lanes: int
    """How many there are."""
    batch: int
    """Answers a step."""
    prompt: float
    """Prompt tokens."""
    lengths: LengthDistribution
    """Of answers."""
    updates: int
    """Optimizer updates a step."""
    adapter: int
    """Rank of a LoRA; 0 for all weights."""
    precision: Precision
    """Of products and of the engine's weights."""
    staleness: float
    """Versions of lag."""
    streams: bool
    """Generation never waits: an answer may span updates."""
    facts: System
    """What the system does."""

    @property
    def separate(self) -> bool:
        """Generation and training have devices of their own."""
        return self.row["strategy_id"] in ("separate", "sync_transfer")

    @property
    def value(self) -> float:
        """What was measured, in the row's unit."""
        return float(self.row["value"])


def rows() -> list[Row]:
    """Every row, in the order of the file."""
    with CASES.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def number(row: Row, key: str, default: float = 0.0) -> float:
    """A number of a row, or the default where it is blank or no number."""
    try:
        return float(row[key])
    except ValueError:
        return default


def count(row: Row, key: str, default: int = 1) -> int:
    """A whole number of a row."""
    return int(number(row, key, default))


def family(row: Row) -> str:
    """The system without version and remarks: rows of two systems differ in more than their placement."""
    return row["system"].removeprefix("Sync ").split()[0].split("-V")[0]


def pose(row: Row, *, open_lengths: bool = False) -> Case | str:
    """The case, or why this row cannot be posed; `open_lengths` allows what only a comparison allows."""
    transfer = row["strategy_id"] == "sync_transfer"
    counted = transfer and mapping(row["strategy"]) is not None
    if row["metric"] in ("best_placement", "generation_latency_reduction"):
        return "is posed as a comparison"
    for lacks, reason in (
        (not row["shape"], "states no model shape"),
        (not row["gpus"] and not counted, "states no number of GPUs"),
        ("unstated" in row["gpu_type"] or ("?" in row["gpu_type"] and not counted), "states no GPU type"),
        (row["usable"] == "no" and not counted, "is contradicted, or states too little"),
        (not row["response_mean"] and not transfer and not open_lengths, "states no mean length"),
        (not row["global_batch"] and not transfer and not open_lengths, "states no batch"),
    ):
        if lacks:
            return reason
    try:
        named = {**row, "gpu_type": row["gpu_type"].rstrip("?")}
        return _posed(named, WEIGHTS_ALONE.get(row["shape"]) or named_shape(row["shape"]))
    except RecipeError as wrong:
        return wrong.problems[0].reason.split(";")[0]


def _posed(row: Row, shape: ModelShape) -> Case:
    device = find_device(row["gpu_type"])
    facts = SYSTEMS.get(family(row), System())
    gpus = count(row, "gpus")
    separate = row["strategy_id"] in ("separate", "sync_transfer")
    generating = count(row, "gen_gpus", gpus // 2 if separate else gpus)
    training = count(row, "train_gpus", gpus - generating if separate else gpus)
    engine, trainer = _engine(row, shape, generating), _trainer(row, shape, facts, training)
    if row["strategy_id"] == "sync_transfer" and (meshes := mapping(row["strategy"])) is not None:
        (trainer, width, generating) = meshes
        engine = Mesh(devices=width, tp=width)
    return Case(
        row=row,
        shape=shape,
        trainer=Site(device=device, mesh=trainer),
        engine=Site(device=device, mesh=engine),
        lanes=max(1, generating // engine.devices),
        batch=count(row, "global_batch", OPEN_BATCH),
        lengths=_lengths(row),
        prompt=0.0 if row["strategy_id"] == "train_only" else number(row, "prompt_mean", OPEN_PROMPT),
        updates=count(row, "updates"),
        adapter=16 if "LoRA" in row["algorithm"] else 0,
        precision="fp8" if row["precision"] == "fp8" else "bfloat16",
        staleness=number(row, "staleness", 1.0 if separate else 0.0),
        streams="async" in row["strategy"] and number(row, "staleness", 1.0) > 0,
        facts=facts,
    )


def mapping(text: str) -> tuple[Mesh, int, int] | None:
    """Trainers, ranks of an engine and all that generate, from "PP16 EP16 -> TP32 DP8": counts follow from degrees."""
    sides = [{name: int(size) for name, size in re.findall(r"\b(TP|PP|EP|DP)(\d+)", side)} for side in text.split("->")]
    if len(sides) != 2 or not all(sides):
        return None
    trains, serves = ({name: side.get(name, 1) for name in ("TP", "PP", "EP", "DP")} for side in sides)
    devices = trains["PP"] * max(trains["TP"], trains["EP"]) * trains["DP"]
    trainer = Mesh(devices=devices, tp=trains["TP"], pp=trains["PP"], ep=trains["EP"], zero=1)
    return trainer, serves["TP"], serves["TP"] * serves["DP"]


def _engine(row: Row, shape: ModelShape, devices: int) -> Mesh:
    """Tensor parallel as stated, or as few ranks as hold the weights in half of their memory; experts over `ep`."""
    if not row["gen_tp"] and row["ep"] and row["metric"] == "rollout_time":
        return Mesh(devices=count(row, "ep"), ep=count(row, "ep"))
    room = 0.5 * find_device(row["gpu_type"]).memory
    width = next((tp for tp in (1, 2, 4, 8, 16) if 2.0 * shape.params / tp <= room), 32)
    width = min(count(row, "gen_tp", width), devices)
    return Mesh(devices=width, tp=width)


def _trainer(row: Row, shape: ModelShape, facts: System, devices: int) -> Mesh:
    tp, pp, cp, ep = (count(row, key) for key in ("train_tp", "pp", "cp", "ep"))
    stages = re.search(r"\bVP(\d+)", row["strategy"])
    plain = tp == pp == ep == 1
    return Mesh(
        devices=devices, tp=tp, pp=pp, cp=cp, ep=ep, zero=3 if facts.fsdp and plain else 1,
        stages=int(stages[1]) if stages else 1,
    )  # fmt: skip


def _lengths(row: Row) -> LengthDistribution:
    cap = number(row, "response_cap")
    if row["strategy_id"] == "train_only" or (row["response_mean"] and not cap):
        mean = number(row, "response_mean", 1.0)
        return LengthDistribution(mean=mean, sigma=0.0, cap=int(mean))
    cap = cap or OPEN_CAP
    share = OPEN_MEAN_REASONING if "distill" in row["shape"] else OPEN_MEAN
    return LengthDistribution(mean=number(row, "response_mean", share * cap), sigma=SIGMA, cap=int(cap))


def halves(posed: list[Case]) -> tuple[set[str], set[str]]:
    """Groups to fit on and groups to check on: every other one by name, so that no one chooses."""
    names = sorted({case.row["group"] for case in posed})
    return set(names[::2]), set(names[1::2])


def as_flatten(case: Case) -> Case:
    """The same work with every role on all devices."""
    gpus = count(case.row, "gpus")
    return replace(
        case,
        row={**case.row, "strategy_id": "flatten"},
        trainer=replace(case.trainer, mesh=replace(case.trainer.mesh, devices=gpus)),
        lanes=max(1, gpus // case.engine.mesh.devices),
        staleness=0.0,
        streams=False,
    )


def pool_tokens(shape: ModelShape, site: Site, *, share: float = 0.85, precision: Precision = "bfloat16") -> float:
    """Tokens that the caches of a lane may hold if its engine has this share of the device; below zero if none fit."""
    fixed = memory.generating(shape, site, 0.0, precision=precision)
    free = share * site.device.memory - fixed.total
    return free * site.mesh.dp / Costs().cache_bytes(shape, site, 1.0, precision)
