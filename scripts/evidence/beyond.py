"""Published measurements that are not in benchmarks/planner_cases.csv: nothing was fitted on them.

They state no layouts, so the planner's own best plan answers: the search that `stretto plan` does. What a source leaves
open is said in the line. A line compares and judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from placements import PPO, four_models
from weight_syncs import LARGE

from stretto.placement.cluster import parse_cluster
from stretto.placement.devices import find_device
from stretto.placement.transport import TensorPath
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.mesh import Mesh, Site
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.transfers import WeightRoute, hand_over
from stretto.planner.enumerate import Variant
from stretto.planner.problem import PlanningProblem
from stretto.planner.search import search, smallest_cluster
from stretto.planner.workload import StepWorkload

GRPO = ("generate", "reference", "train")
"""Roles of GRPO with a reference."""
SMALLEST = (
    ("qwen2.5-0.5b", 32, "H100", 1), ("qwen2.5-1.5b", 32, "H100", 1), ("qwen2.5-3b", 32, "H100", 1),
    ("qwen2.5-7b", 32, "H100", 1), ("qwen2.5-14b", 32, "H100", 2), ("qwen2.5-32b", 32, "H100", 4),
    ("qwen2.5-72b", 32, "H100", 8), ("qwen2.5-7b", 0, "H800", 2), ("qwen2.5-14b", 0, "H800", 4),
    ("qwen2.5-32b", 0, "H20", 8), ("qwen2.5-72b", 0, "H20", 32),
)  # fmt: skip
"""Model, rank of its adapter, device, and with how many of them verl's docs/perf/device_tuning.rst runs GRPO."""
NEMO = (("32xH100", "flatten", 192.0), ("32xH100", "separate", 152.0), ("16xGB200", "flatten", 221.0),
        ("16xGB200", "separate", 301.0))  # fmt: skip
"""Cluster, strategy, seconds of a step: NeMo-RL 0.6, docs/about/performance-summary.md, Qwen3-30B-A3B, 2048 answers."""
QUICKSTART = {"generate": 21.5, "reference": 4.4, "value": 5.8, "fit": 15.7, "train": 20.3}
"""Seconds of stages: verl, docs/start/quickstart.rst, PPO with Qwen2.5-0.5B and 256 answers; the GPU is not named."""


CHECKPOINT_ENGINE = (
    ("glm-4.5-air", "bfloat16", "H800", 8, 8, 3.47), ("qwen3-235b-a22b", "bfloat16", "H800", 8, 8, 6.22),
    ("deepseek-v3", "fp8", "H20", 16, 16, 10.19), ("kimi-k2", "fp8", "H20", 16, 16, 14.36),
    ("deepseek-v3", "fp8", "H20", 256, 16, 11.33), ("kimi-k2", "fp8", "H20", 256, 16, 16.04),
)  # fmt: skip
"""Model, precision, device, how many, ranks of an engine, seconds: MoonshotAI/checkpoint-engine, README.md, "Update
(Broadcast)": weights that lie in host memory, spread over the ranks, are broadcast and loaded by vLLM."""


def lines(costs: Costs) -> Iterator[str]:
    """Everything, a line per measurement."""
    yield from broadcasts(costs)
    yield from scaling(costs)
    for cluster, strategy, seconds in NEMO:
        lag = 1 if strategy == "separate" else 0
        work = workload(
            "qwen3-30b-a3b", GRPO, 64, 32, LengthDistribution(mean=3203, sigma=1.0, cap=3976), staleness=lag
        )
        (best,) = search(setting(work, cluster, costs), (Variant(strategy=strategy),)).best
        told = f"measured {seconds:.0f} s, with the best of all layouts {best.step:.0f} s"
        yield f"NeMo-RL 0.6, Qwen3-30B-A3B, {cluster}, {strategy}: {told}"
    for model, adapter, device, measured in SMALLEST:
        work = workload(model, GRPO, 8, 2, LengthDistribution(mean=256, sigma=0.5, cap=1024), adapter=adapter)
        alone, flatten = setting(work, f"1x{device}", costs), (Variant(strategy="flatten"),)
        count = 1 if search(alone, flatten).best else smallest_cluster(alone, flatten)
        how = f"LoRA of rank {adapter}" if adapter else "all weights"
        yield f"smallest cluster, GRPO, {model}, {how}: published {measured} x {device}, predicted {count}"
    yield quickstart(costs)


def broadcasts(costs: Costs) -> Iterator[str]:
    """Hand-overs of checkpoint-engine."""
    route = WeightRoute(
        path=TensorPath.NCCL, whole=True, bucket=LARGE, staged=1, loads=True, gathers=False
    )  # fmt: skip
    for model, precision, device, count, width, measured in CHECKPOINT_ENGINE:
        trainer, engine = (Site(device=find_device(device), mesh=Mesh(devices=count, tp=tp)) for tp in (1, width))
        took = hand_over(
            costs, route, named_shape(model), trainer, engine, receivers=count, crosses=count > 8, precision=precision
        ).seconds
        times = f"measured {measured:.1f} s, predicted {took:.1f} s"
        yield f"checkpoint-engine, {model} in {precision}, {count}x{device}: {times}"


def workload(
    model: str, roles: tuple[str, ...], prompts: int, samples: int, lengths: LengthDistribution, *, adapter: int = 0,
    staleness: int = 0,
) -> StepWorkload:  # fmt: skip
    """A step of these roles, all with the same model, on prompts of 120 tokens."""
    reading = {"generate", "value"} | ({"reference"} if adapter else set())
    return StepWorkload(
        shapes=dict.fromkeys(roles, named_shape(model)), prompts=prompts, samples=samples, updates=1,
        prompt=120, lengths=lengths, adapter=adapter, reading=frozenset(reading & set(roles)), precision="bfloat16",
        base="bfloat16", staleness=staleness, nccl=True,
    )  # fmt: skip


def setting(work: StepWorkload, cluster: str, costs: Costs) -> PlanningProblem:
    """A workload on a cluster."""
    return PlanningProblem(workload=work, cluster=parse_cluster(cluster), costs=costs)


def scaling(costs: Costs) -> Iterator[str]:
    """HybridFlow: speed-up over the growth of the cluster, and the actor's share of a step, means over its sizes."""
    gained, shares = [], []
    for model, few, many in (("llama-7b", 8, 128), ("llama-13b", 16, 128), ("llama2-34b", 32, 128)):
        runs = [four_models(named_shape(model), gpus, costs).values() for gpus in (few, many)]
        best = [min(found, key=lambda forecast: forecast.step) for found in runs]
        gained.append(best[0].step / best[1].step / (many / few))
        actor = [found.stages["generate"] + found.stages["train"] + found.ending.update / 2 for found in best]
        shares += [seconds / found.step for seconds, found in zip(actor, best, strict=True)]
    each = ", ".join(f"{share:.0%}" for share in gained)
    yield f"HybridFlow, strong scaling of PPO: measured 66.8% on average, predicted {mean(gained):.0%} ({each})"
    yield f"HybridFlow, generating and training the actor: measured 58.9% of a step, predicted {mean(shares):.0%}"


def quickstart(costs: Costs) -> str:
    """PPO with a critic on one GPU: what each stage takes of all of them, because the GPU is not named."""
    roles = tuple(role for role in PPO if role != "reward")
    work = workload("qwen2.5-0.5b", roles, 256, 1, LengthDistribution(mean=239, sigma=0.5, cap=256))
    (found,) = search(setting(work, "1xA100", costs), (Variant(strategy="flatten"),)).best
    whole, predicted = sum(QUICKSTART.values()), sum(found.stages[role] for role in QUICKSTART)
    told = ", ".join(
        f"{role} {seconds / whole:.0%} and {found.stages[role] / predicted:.0%}" for role, seconds in QUICKSTART.items()
    )
    return f"verl's quickstart, PPO with Qwen2.5-0.5B on one GPU, measured and predicted shares: {told}"
