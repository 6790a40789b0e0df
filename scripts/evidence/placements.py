"""The signs of published comparisons: colocated or split, synchronous or asynchronous, and HybridFlow's best placement.

A sign is drawn inside one group of rows of one system, on one metric, from values at least 5 % apart. Rows may leave
lengths and batches open there; both sides of a comparison are then posed with the same assumption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product

from answers import answer
from cases import Case, Row, family, pose

from stretto.placement import closed, memory
from stretto.placement.closed import Stages
from stretto.placement.cost import Costs
from stretto.placement.devices import Device, find_device
from stretto.placement.lane import decode
from stretto.placement.load import Load
from stretto.placement.mesh import Mesh, Site
from stretto.placement.shapes import ModelShape, named_shape

SMALLEST = 1.05
"""Values closer than this have no sign."""
LOWER_IS_BETTER = {"step_time", "total_time_100_steps", "total_train_time"}
HIGHER_IS_BETTER = {"throughput_per_gpu", "throughput_total"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One comparison."""

    group: str
    """Where it comes from."""
    text: str
    """What is compared."""
    measured: float
    """Measured ratio, first over second; for a label 1."""
    predicted: float
    """Predicted ratio; for a label 1 where it is the same."""

    @property
    def right(self) -> bool:
        """The same side won."""
        return (self.measured > 1) == (self.predicted > 1)


def mode(case: Case) -> str:
    """colocated, split and synchronous, or split and asynchronous."""
    if not case.separate:
        return "colocated"
    return "split async" if case.staleness else "split sync"


def signs(rows: list[Row], costs: Costs) -> Iterator[Sign]:
    """Every sign that can be drawn."""
    groups: dict[tuple[str, str, str, str], list[Case]] = {}
    for row in rows:
        if row["metric"] in LOWER_IS_BETTER | HIGHER_IS_BETTER and row["strategy_id"] in ("flatten", "separate"):
            case = pose(row, open_lengths=True)
            if isinstance(case, Case):
                groups.setdefault((row["group"], family(row), row["metric"], row["precision"]), []).append(case)
    for (group, _, metric, _), cases in groups.items():
        for first, second in combinations(cases, 2):
            measured = first.value / second.value
            if mode(first) == mode(second) or 1 / SMALLEST < measured < SMALLEST:
                continue
            predicted = [answer(case, costs) for case in (first, second)]
            text = f"{metric}: {_side(first)} against {_side(second)}"
            yield Sign(group=group, text=text, measured=measured, predicted=predicted[0] / predicted[1])
    yield from best_placements(rows, costs)
    yield from narrower_lanes(rows, costs)


def _side(case: Case) -> str:
    return f"{mode(case)} on {case.row['gpus']}"


def best_placements(rows: list[Row], costs: Costs) -> Iterator[Sign]:
    """PPO with four models of one size: colocated (flatten), or split ({actor, reference} | {critic, reward})."""
    for row in rows:
        if row["metric"] == "best_placement":
            shape = named_shape({"13B": "llama-13b", "34B": "llama2-34b"}[row["actor_params"]])
            device, gpus = find_device(row["gpu_type"]), int(row["gpus"])
            times = four_models(shape, device, gpus, costs)
            best = min(times, key=times.__getitem__)
            text = f"best on {gpus}: {row['value']}, predicted {best} " + " ".join(
                f"{k} {v:.0f} s" for k, v in times.items()
            )
            predicted = 2.0 if best == row["value"] else 0.5
            yield Sign(group=row["group"], text=text, measured=2.0, predicted=predicted)


def narrower_lanes(rows: list[Row], costs: Costs) -> Iterator[Sign]:
    """HybridFlow's generation with fewer tensor parallel ranks than training has, against as many."""
    for row in rows:
        if row["metric"] == "generation_latency_reduction":
            shape = named_shape({"7B": "llama-7b", "13B": "llama-13b"}[row["actor_params"]])
            trainer = Site(device=find_device(row["gpu_type"]), mesh=Mesh(devices=int(row["gpus"]), tp=8, zero=1))
            took = {engine.mesh.tp: seconds for engine, seconds in lanes(shape, trainer, 0.0, costs)}
            few, many = int(row["gen_tp"]), int(row["train_tp"])
            measured, predicted = 1 - float(row["value"]) / 100, took[few] / took[many]
            text = f"generating with {few} ranks a lane against {many}"
            yield Sign(group=row["group"], text=text, measured=measured, predicted=predicted)


BATCH, PROMPT, RESPONSE, UPDATES = 1024, 1024.0, 1024, 8
"""HybridFlow's workload."""


def four_models(shape: ModelShape, device: Device, gpus: int, costs: Costs) -> dict[str, float]:
    """Seconds of a step by placement, each with its best layouts that fit."""
    half = gpus // 2
    times = {}
    if (whole := roles(shape, device, gpus, costs, trained=2, frozen=2)) is not None:
        times["colocate"] = closed.flatten(replace(whole, value=whole.old, reward=whole.old, fit=whole.train))
    if (pair := roles(shape, device, half, costs, trained=1, frozen=1)) is not None:
        times["split"] = closed.interleave_pairs(replace(pair, value=pair.old, reward=pair.old, fit=pair.train))
    return times


@lru_cache(maxsize=256)
def roles(shape: ModelShape, device: Device, gpus: int, costs: Costs, *, trained: int, frozen: int) -> Stages | None:
    """Seconds of the actor's stages on so many devices that also hold the states of the others."""
    found = []
    for tp, pp in product((1, 2, 4, 8), (1, 2, 4)):
        site = Site(device=device, mesh=Mesh(devices=gpus, tp=tp, pp=pp, zero=1))
        held = memory.training(shape, site, PROMPT + RESPONSE)
        resident = trained * memory.states(shape, site).total + frozen * memory.weights(shape, site)
        if gpus % (tp * pp) or not memory.fits(resident + held.total - held.states, site):
            continue
        load = Load.sequence(PROMPT + RESPONSE, count=BATCH)
        forward = costs.forward(shape, site, load)
        at = Stages(
            generate=0.0, old=forward, reference=forward, switch=costs.rates.phase,
            train=costs.train(shape, site, load, updates=UPDATES, recompute=True),
        )  # fmt: skip
        found += [
            replace(at, generate=seconds, publish=costs.reshard(shape, site, engine))
            for engine, seconds in lanes(shape, site, resident, costs)
        ]
    return min(found, key=closed.flatten, default=None)


def lanes(shape: ModelShape, trainer: Site, resident: float, costs: Costs) -> Iterator[tuple[Site, float]]:
    """Every width of lane that leaves room for caches beside what is resident, and the seconds of generating."""
    for tp in (1, 2, 4, 8):
        engine = Site(device=trainer.device, mesh=Mesh(devices=tp, tp=tp))
        share = max(0.0, memory.USABLE - resident / trainer.device.memory)
        pool = memory.pool_tokens(shape, engine, share=share)
        if trainer.mesh.devices % tp == 0 and pool > PROMPT + RESPONSE:
            answers = [RESPONSE] * -(-BATCH // (trainer.mesh.devices // tp))
            yield engine, _lane(shape, engine, answers, pool, costs)


def _lane(shape: ModelShape, engine: Site, answers: list[int], pool: float, costs: Costs) -> float:
    def tick(batch: float, context: float) -> float:
        return costs.tick(shape, engine, batch, context)

    def prefill(tokens: float) -> float:
        return costs.prefill(shape, engine, Load.sequence(PROMPT, count=tokens / PROMPT))

    return decode(answers, PROMPT, tick, slots=1024, pool=pool, prefill=prefill).seconds
