"""By which path tensors pass between devices follows from what the devices are, and from one switch."""

import pytest

from stretto.placement.strategies import STRATEGIES, StrategyInputs
from stretto.placement.transport import TensorPath, gradient_path, path_between, weight_path

CPU, GPU = ["localhost/cpu:0", "localhost/cpu:1"], ["host0/gpu:0", "host0/gpu:1", "host1/gpu:0", "host1/gpu:1"]


@pytest.mark.parametrize(
    ("devices", "nccl", "path"),
    [
        (GPU, True, TensorPath.NCCL),
        (GPU, False, TensorPath.GLOO),  # what was tried is what is used unless asked
        (CPU, True, TensorPath.GLOO),
        ([GPU[0], CPU[0]], True, TensorPath.GLOO),
        ([GPU[0], GPU[1], GPU[0]], True, TensorPath.GLOO),  # NCCL refuses two processes on one card
        (GPU[:1], True, TensorPath.SHARED),
        ([], True, TensorPath.SHARED),
    ],
)
def test_cards_that_are_all_different_may_use_nccl_and_everything_else_meets_in_host_memory(devices, nccl, path):
    assert path_between(devices, nccl=nccl) is path


def planned(strategy, devices, **layout):
    roles = frozenset({"generate", "train"})
    return STRATEGIES[strategy].plan(StrategyInputs(devices=tuple(devices), roles=roles, **layout))


@pytest.mark.parametrize(
    ("plan", "gradients", "weights"),
    [
        (planned("flatten", GPU[:1]), "shared", "shared"),
        (planned("elastic", GPU[:2]), "nccl", "nccl"),
        (planned("separate", GPU[:2]), "shared", "nccl"),  # one trains, and the other gets what it has made
        (planned("elastic", CPU), "gloo", "gloo"),
        (planned("flatten", GPU, width={"train": 2}), "nccl", "nccl"),
    ],
)
def test_a_plan_tells_the_paths_of_its_gradients_and_weights(plan, gradients, weights):
    assert gradient_path(plan, nccl=True).value == gradients
    assert weight_path(plan, nccl=True).value == weights


def test_every_path_has_words():
    assert len({path.sentence for path in TensorPath}) == len(TensorPath)
    assert TensorPath.GLOO.sentence == "gloo, through host memory"
