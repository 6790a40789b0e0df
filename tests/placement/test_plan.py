"""Plans are values: everything in them can be printed, and what a run writes is what others read."""

import json

import pytest

from running import recipe_in
from stretto.placement.strategies import STRATEGIES, StrategyInputs
from stretto.runtime.plans import make_plan

LORA = {"kind": "lora", "rank": 2, "alpha": 4, "targets": "all-linear"}
KL = {"coef": 0.1}


@pytest.fixture
def planned(tmp_path):
    """The plan of a tiny recipe with these changes, on the CPU."""
    return lambda **changes: make_plan(recipe_in(tmp_path, placement__cluster="1xcpu", **changes))


@pytest.mark.parametrize("changes", [{}, {"algorithm__kl": KL}])
def test_one_device_serves_each_role_in_the_order_of_the_stages(planned, changes):
    plan = planned(**changes)
    assert [cell.role for cell in plan.cells] == ["generate", *(["reference"] if changes else []), "train"]
    assert {cell.devices for cell in plan.cells} == {("localhost/cpu:0",)}
    assert plan.priority == {"localhost/cpu:0": tuple(cell.name for cell in plan.cells)}
    assert {cell.role: cell.engine for cell in plan.cells if cell.engine} == {"generate": "native"}


def test_the_reference_reads_the_trainers_tensors_where_it_is_the_adapter_switched_off(planned):
    adapted = planned(algorithm__kl=KL, model__adapter=LORA)
    assert {cell.role: cell.weights for cell in adapted.cells} == {
        "generate": "shared:train",
        "reference": "shared:train",
        "train": "own",
    }
    whole = planned(algorithm__kl=KL)
    assert {cell.role: cell.weights for cell in whole.cells if cell.role == "reference"} == {"reference": "own"}


def test_the_plan_of_a_run_is_strictly_on_policy_and_phased(planned):
    plan = planned()
    assert (plan.strategy, plan.flow, plan.staleness, plan.optimizer) == ("flatten", "phased", 0, "replicated")


def test_a_plan_is_written_under_the_names_that_others_read():
    plan = STRATEGIES["flatten"].plan(
        StrategyInputs(devices=("localhost/cpu:0",), roles=frozenset({"generate", "train"}))
    )
    written = json.loads(json.dumps(plan.to_json()))
    assert set(written) == {"strategy", "flow", "staleness", "optimizer", "cells", "priority", "tail"}
    names = {
        "name",
        "role",
        "devices",
        "mesh",
        "engine",
        "weights",
        "sleeps",
        "token_budget",
        "recompute",
        "memory_share",
    }
    assert [set(cell) for cell in written["cells"]] == [names, names]
    assert written["cells"][0]["mesh"] == {"dp_shard": 1, "tp": 1, "pp": 1, "ep": 1}
    assert written["cells"][0]["sleeps"] == []
    assert written["tail"] == {"move": False, "gate": None}
    assert written["priority"] == {"localhost/cpu:0": ["generate", "train"]}
