"""What is asked of a Ray cluster, and what is told of one that has too little."""

from pathlib import Path

import pytest

from stretto.workers.launchers.ray_resources import TOUCH, bundle_of, of_kinds, seeing, shortage
from stretto.workers.worker_spec import LaneSpec, WorkerSpec


def host(gpus=0, cpus=64, *marks):
    """A node's resources."""
    return {"CPU": float(cpus), "memory": 1e9, **({"GPU": float(gpus)} if gpus else {}), **dict.fromkeys(marks, 1.0)}


def bundle(gpus=0, cpus=8, *marks):
    """What is asked of one."""
    return {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {}), **dict.fromkeys(marks, TOUCH)}


@pytest.mark.parametrize(
    ("bundles", "nodes", "free", "told"),
    [
        ([bundle(8)] * 2, [host(12), host(4)], None, "needs 2 hosts with 8 GPU, sees 12, 4"),
        ([bundle(8)] * 2, [host(16)], None, "needs 2 hosts, sees 1"),
        ([bundle(8)] * 3, [host(4)] * 3, None, "needs 3 hosts with 8 GPU, sees 4 (3 times)"),
        ([bundle(8), bundle(4)], [host(8), host(2)], None, "needs 2 hosts with 4 GPU, sees 8, 2"),
        ([bundle(0, 2)], [host(0, 1)], None, "needs a host with 2 CPU, sees 1"),
        ([bundle(8, 8)], [host(8, 4), host(4, 8)], None, "needs a host with 8 CPU and 8 GPU together, sees 0"),
        (
            [bundle(8, 8, "node:10.0.0.1")],
            [host(4, 64, "node:10.0.0.1"), host(8, 64, "node:10.0.0.2")],
            None,
            "needs a host at 10.0.0.1 with 8 GPU, sees 4",
        ),
        (
            [bundle(8, 8, "accelerator_type:H20")] * 2,
            [host(8, 64, "accelerator_type:H20"), host(8, 64, "accelerator_type:H800")],
            None,
            "needs 2 hosts of H20, sees 1",
        ),
        (
            [bundle(8)] * 2,
            [host(8)] * 2,
            [host(8), host(2)],
            "needs 2 hosts with 8 GPU, sees 8, 2 free (others have taken the rest)",
        ),
        ([bundle(8)] * 2, [host(8)] * 2, None, "all of it is there and free by now"),
    ],
)
def test_what_a_cluster_lacks_is_named(bundles, nodes, free, told):
    assert shortage(bundles, nodes, nodes if free is None else free) == told


def test_a_host_must_have_a_core_for_each_device_and_the_gpus():
    assert bundle_of(["host0/gpu:0", "host0/gpu:1"]) == {"CPU": 2.0, "GPU": 2.0}
    assert bundle_of(["host0/cpu:0"]) == {"CPU": 1.0}


H800, H20 = "accelerator_type:H800", "accelerator_type:H20"


@pytest.mark.parametrize(
    ("kinds", "marks", "asked"),
    [
        (["H800", "H20"], [H20, H800], [{H800: TOUCH}, {H20: TOUCH}]),
        (["H800", "H800"], [H800, H800], [{}, {}]),
        (["H800", "cpu"], [H800], [{H800: TOUCH}, {}]),
        (["H800", "MI300X"], [H800, "accelerator_type:AMD-Instinct-MI300X-OAM"], [{H800: TOUCH}, {}]),
        (["RTX4090", "H20"], [H20, "accelerator_type:GeForce-RTX-4090"], [
            {"accelerator_type:GeForce-RTX-4090": TOUCH}, {H20: TOUCH},
        ]),
        (["A100", "A100-40GB"], ["accelerator_type:A100"] * 2, [{"accelerator_type:A100": TOUCH}, {}]),
        (["H800", "H20"], [], [{}, {}]),
    ],
)  # fmt: skip
def test_a_kind_is_asked_for_only_where_there_are_several_and_ray_knows_it(kinds, marks, asked):
    assert of_kinds(kinds, [host(8, 64, mark) for mark in marks]) == asked


def test_a_part_of_a_cluster_of_several_kinds_is_asked_for_by_its_kind_too():
    nodes = [host(8, 64, mark) for mark in (H20, H800)]
    assert of_kinds(["H20"], nodes, among=["H20", "H800"]) == [{H20: TOUCH}]


@pytest.mark.parametrize(
    ("device", "listed", "told"),
    [
        ("localhost/gpu:2", None, "2"),
        ("localhost/gpu:2", "4,5,6,7", "6"),
        ("localhost/gpu:0", "GPU-1f, GPU-2e", "GPU-1f"),
        ("localhost/gpu:1", "GPU-1f, GPU-2e", "GPU-2e"),
        ("localhost/cpu:1", "4,5", None),
    ],
)
def test_a_process_sees_the_gpu_that_the_plan_gives_it_and_knows_those_of_its_lane(device, listed, told):
    mates = (device.replace(device[-1], "0"), device)
    lane = LaneSpec(cell="generate", rank=1, size=2, team=2, devices=mates)
    nothing = {"recipe": None, "root": Path(), "base": None, "roles": frozenset(), "token_budget": 1}
    alone = WorkerSpec(device=device, **nothing)
    assert seeing(alone, listed) == (alone, told)
    spec, sees = seeing(WorkerSpec(device=device, lane=lane, **nothing), listed)
    first = listed.partition(",")[0] if listed else "0"
    assert sees == told and spec.lane.gpus == ((first, told) if told else ())
