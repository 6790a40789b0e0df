"""Plans are values: everything in them can be printed, and one device serves its roles one after the other."""

import json

import pytest

from stretto.placement.plan import ROLES, flatten_on_one_device


@pytest.mark.parametrize("needs_reference", [False, True])
def test_one_device_serves_each_role_in_the_order_of_the_stages(needs_reference):
    plan = flatten_on_one_device("localhost/cpu:0", needs_reference=needs_reference)
    roles = [cell.role for cell in plan.cells]
    assert roles == ["generate", *(["reference"] if needs_reference else []), "train"]
    assert roles == [role for role in ROLES if role in roles]
    assert {cell.devices for cell in plan.cells} == {("localhost/cpu:0",)}
    assert plan.priority == {"localhost/cpu:0": tuple(cell.name for cell in plan.cells)}


def test_all_roles_share_the_tensors_of_the_one_that_trains():
    plan = flatten_on_one_device("localhost/gpu:0", needs_reference=True, engine="native")
    assert {cell.role: cell.weights for cell in plan.cells} == {
        "train": "own",
        "generate": "shared:train",
        "reference": "shared:train",
    }
    assert {cell.role: cell.engine for cell in plan.cells} == {"generate": "native", "reference": None, "train": None}


def test_a_plan_is_strictly_on_policy_and_phased():
    plan = flatten_on_one_device("localhost/cpu:0", needs_reference=False)
    assert (plan.strategy, plan.flow, plan.staleness, plan.optimizer) == ("flatten", "phased", 0, "replicated")


def test_a_plan_is_written_under_the_names_that_others_read():
    plan = flatten_on_one_device("localhost/cpu:0", needs_reference=False)
    written = json.loads(json.dumps(plan.to_json()))
    assert set(written) == {"strategy", "flow", "staleness", "optimizer", "cells", "priority", "tail"}
    names = {"name", "role", "devices", "mesh", "engine", "weights", "sleeps", "token_budget"}
    assert [set(cell) for cell in written["cells"]] == [names, names]
    assert written["cells"][0]["mesh"] == {"dp_shard": 1, "tp": 1, "pp": 1, "ep": 1}
    assert written["cells"][0]["sleeps"] == []
    assert written["tail"] == {"move": False, "gate": None}
    assert written["priority"] == {"localhost/cpu:0": ["generate", "train"]}
