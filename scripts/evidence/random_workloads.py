"""Random steps of two kinds on clusters of about their size: LoRA on a mixture of 671B, PPO with four models.

Drawn from a seed, so the same number of them is always the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from stretto.placement.cluster import parse_cluster
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.shapes import named_shape
from stretto.planner.problem import PlanningProblem
from stretto.planner.workload import StepWorkload

PPO = ("generate", "train", "reference", "reward", "value", "fit")
HOSTS = {"llama-7b": (1, 2), "llama-13b": (1, 2, 3, 4), "llama-33b": (4, 6, 8), "llama-65b": (8, 12, 16)}
"""Model -> hosts of eight devices that PPO with four of it is tried on."""


def draw(count: int, seed: int = 0) -> Iterator[tuple[str, PlanningProblem]]:
    """(what it is, the problem), the two kinds in turns."""
    dice = random.Random(seed)
    for index in range(count):
        yield _mixture(dice, index) if index % 2 == 0 else _four_models(dice, index)


def _lengths(dice: random.Random, caps: tuple[int, ...]) -> LengthDistribution:
    cap = dice.choice(caps)
    return LengthDistribution(mean=dice.uniform(0.05, 0.5) * cap, sigma=dice.uniform(0.3, 1.3), cap=cap)


def _mixture(dice: random.Random, index: int) -> tuple[str, PlanningProblem]:
    work = StepWorkload(
        shapes=dict.fromkeys(("generate", "train"), named_shape("deepseek-v3")),
        prompts=dice.choice((16, 32, 64)), samples=dice.choice((4, 8, 16)), updates=1,
        prompt=dice.choice((100, 200, 1000)), lengths=_lengths(dice, (2048, 8192, 20480)),
        adapter=dice.choice((8, 32, 64)), reading=frozenset({"generate"}), precision="bfloat16",
        base=dice.choice(("fp8", "nf4")), recompute=dice.choice((None, True)),
        acceptance=dice.choice((None, None, 0.5)), max_rounds=4, seed=index, nccl=True,
    )  # fmt: skip
    cluster = f"{dice.choice((4, 6, 8, 12, 16))}x8x{dice.choice(('H100', 'H800', 'H200'))}"
    return _told(work, cluster), PlanningProblem.of(work, parse_cluster(cluster))


def _four_models(dice: random.Random, index: int) -> tuple[str, PlanningProblem]:
    model = dice.choice(tuple(HOSTS))
    work = StepWorkload(
        shapes=dict.fromkeys(PPO, named_shape(model)),
        prompts=dice.choice((128, 256, 512)), samples=1, updates=dice.choice((1, 1, 4)),
        prompt=dice.choice((64, 128, 512)), lengths=_lengths(dice, (256, 480, 1024)),
        adapter=0, reading=frozenset({"generate", "value"}), precision="bfloat16", base="bfloat16",
        recompute=dice.choice((None, True)), seed=index, nccl=True,
    )  # fmt: skip
    cluster = f"{dice.choice(HOSTS[model])}x8x{dice.choice(('A100-80', 'H100'))}"
    return _told(work, cluster), PlanningProblem.of(work, parse_cluster(cluster))


def _told(work: StepWorkload, cluster: str) -> str:
    lengths = work.lengths
    base = f" {work.base} rank {work.adapter}" if work.adapter else ""
    return (
        f"{work.shapes['train'].name}{base} on {cluster}, {work.prompts} x {work.samples} answers of "
        f"{lengths.mean:.0f} up to {lengths.cap} (sigma {lengths.sigma:.1f}), {work.updates} updates, seed {work.seed}"
    )
