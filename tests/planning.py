"""Steps and clusters that tests ask the planner about."""

from __future__ import annotations

from stretto.placement.cluster import parse_cluster
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.cost.shapes import named_shape
from stretto.planner.problem import PlanningProblem
from stretto.planner.workload import StepWorkload

PPO = ("generate", "train", "reference", "reward", "value", "fit")


def workload(model="qwen2.5-3b", roles=("generate", "train"), **changes):
    told = {
        "shapes": dict.fromkeys(roles, named_shape(model)),
        "prompts": 16,
        "samples": 8,
        "updates": 1,
        "prompt": 200,
        "lengths": LengthDistribution(mean=400.0, sigma=1.0, cap=2048),
        "adapter": 0,
        "reading": frozenset({"generate", "value"} & set(roles)),
        "precision": "bfloat16",
        "base": "bfloat16",
        "nccl": True,
    }
    return StepWorkload(**(told | changes))


def setting_of(cluster, model="qwen2.5-3b", **changes):
    return PlanningProblem.of(workload(model, **changes), parse_cluster(cluster))
