"""The signs of published comparisons: colocated or split, synchronous or asynchronous, and HybridFlow's best placement.

HybridFlow's placements are what the planner finds for its workload, by the search that `stretto plan` does. A sign is
drawn inside one group of rows of one system, on one metric, from values at least 5 % apart. Rows may leave lengths and
batches open there; both sides of a comparison are then posed with the same assumption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from answers import answer
from cases import Case, Row, family, pool_tokens, pose

from stretto.placement.cluster import parse_cluster
from stretto.placement.devices import find_device
from stretto.placement.strategies import PRESETS
from stretto.planner.cost import memory
from stretto.planner.cost.decode_time import decode
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.mesh import Mesh, Site
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import ModelShape, named_shape
from stretto.planner.cost.token_load import TokenLoad
from stretto.planner.enumerate import Variant
from stretto.planner.problem import PlanningProblem
from stretto.planner.search import search
from stretto.planner.simulate import Forecast
from stretto.planner.workload import StepWorkload

SMALLEST = 1.05
"""Values closer than this have no sign."""
LOWER_IS_BETTER = {"step_time", "total_time_100_steps", "total_train_time"}
HIGHER_IS_BETTER = {"throughput_per_gpu", "throughput_total"}
PPO = ("generate", "reference", "reward", "value", "train", "fit")
"""Roles of PPO with four models."""
BATCH, PROMPT, RESPONSE, UPDATES = 1024, 1024, 1024, 8
"""HybridFlow's workload."""


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
    yield from compared(rows, costs)
    yield from best_placements(rows, costs)
    yield from narrower_lanes(rows, costs)


def compared(rows: list[Row], costs: Costs) -> Iterator[Sign]:
    """Pairs of rows of one group that were run in different modes."""
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


def _side(case: Case) -> str:
    return f"{mode(case)} on {case.row['gpus']}"


def best_placements(rows: list[Row], costs: Costs) -> Iterator[Sign]:
    """PPO with four models of one size. All 15 ways to put them into groups are searched, with any sizes; HybridFlow
    names the best of its own: colocate, split ({actor, reference} | {critic, reward}) or standalone."""
    for row in rows:
        if row["metric"] == "best_placement":
            shape = named_shape({"13B": "llama-13b", "34B": "llama2-34b"}[row["actor_params"]])
            times = {name: found.step for name, found in four_models(shape, int(row["gpus"]), costs).items()}
            first = min(times, key=times.__getitem__)
            best = placed(first)
            told = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in times.items())
            text = f"best on {row['gpus']} of all groups of models: {row['value']}, predicted {best} ({told})"
            predicted = 2.0 if best == row["value"] else 0.5
            yield Sign(group=row["group"], text=text, measured=2.0, predicted=predicted)


class Published(StepWorkload):
    """PPO as HybridFlow runs it: ratios are to its engine's log-probabilities, which are not computed again."""

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """All but that."""
        return tuple(stage for stage in super().stages if stage != "old")


class Megatron(Costs):
    """HybridFlow's trainers: ranks keep their weights; gradients are scattered and weights gathered at each update."""

    def update(self, shape: ModelShape, site: Site, **how: Any) -> float:
        """As of a sharded optimizer."""
        return super().update(shape, replace(site, mesh=replace(site.mesh, zero=min(site.mesh.zero, 1))), **how)


def four_models(shape: ModelShape, gpus: int, costs: Costs) -> dict[str, Forecast]:
    """Label -> the best plans of HybridFlow's workload on A100, for all ways to group the four models."""
    shapes = {role: replace(shape, speaks=role not in ("reward", "value", "fit")) for role in PPO}
    work = Published(
        shapes=shapes, prompts=BATCH, samples=1, updates=UPDATES, prompt=PROMPT,
        lengths=LengthDistribution(mean=RESPONSE, sigma=0.0, cap=RESPONSE), adapter=0,
        reading=frozenset({"generate", "value"}),
        precision="bfloat16", base="bfloat16", recompute=True, nccl=True,
    )  # fmt: skip
    variants = (
        Variant(strategy="flatten"),
        Variant(strategy="interleave", fractions=PRESETS["I2"]),
        Variant(strategy="interleave", groups=True),
    )
    setting = PlanningProblem(workload=work, cluster=parse_cluster(f"{gpus}xA100"), costs=Megatron(rates=costs.rates))
    return {forecast.choice.label: forecast for forecast in search(setting, variants).best}


def placed(label: str) -> str:
    """What HybridFlow calls a placement; reference and reward model are of one size here, so each may be the other."""
    groups = [set(group.partition(":")[0].split("+")) for group in label.split()[1:]]
    if label == "flatten":
        return "colocate"
    if label == "interleave I2" or ({"actor", "reward"} in groups and {"critic", "reference"} in groups):
        return "split"
    return "standalone" if len(groups) == 4 else label


def narrower_lanes(rows: list[Row], costs: Costs) -> Iterator[Sign]:
    """HybridFlow's generation with fewer tensor parallel ranks than training has, against as many."""
    for row in rows:
        if row["metric"] == "generation_latency_reduction":
            shape = named_shape({"7B": "llama-7b", "13B": "llama-13b"}[row["actor_params"]])
            took = lanes(shape, int(row["gpus"]), costs)
            few, many = int(row["gen_tp"]), int(row["train_tp"])
            measured, predicted = 1 - float(row["value"]) / 100, took[few] / took[many]
            best = min(took, key=took.__getitem__)
            text = f"generating with {few} ranks a lane against {many}, best {few}, predicted best {best}"
            yield Sign(group=row["group"], text=text, measured=measured, predicted=predicted)


def lanes(shape: ModelShape, gpus: int, costs: Costs) -> dict[int, float]:
    """Ranks of a lane -> seconds of generating, for every width that leaves room for caches."""
    device, found = find_device("A100"), {}
    for tp in (1, 2, 4, 8):
        engine = Site(device=device, mesh=Mesh(devices=tp, tp=tp))
        pool = pool_tokens(shape, engine, share=memory.USABLE)
        if pool > PROMPT + RESPONSE:
            found[tp] = _lane(shape, engine, [RESPONSE] * -(-BATCH // (gpus // tp)), pool, costs)
    return found


def _lane(shape: ModelShape, engine: Site, answers: list[int], pool: float, costs: Costs) -> float:
    def tick(batch: float, context: float) -> float:
        return costs.tick(shape, engine, batch, context)

    def prefill(tokens: float) -> float:
        return costs.prefill(shape, engine, TokenLoad.sequence(PROMPT, count=tokens / PROMPT))

    return decode(answers, PROMPT, tick, slots=1024, pool=pool, prefill=prefill).seconds
