"""A cell of two processes that hold slices of a model: it trains as one device does, and its state is one device's."""

import copy

import pytest
import torch
from torch import multiprocessing

from slices import CASES, CHOICES, SECTION, SIZE, in_slices, policy_of, taken
from stretto.algorithms.base import build
from stretto.recipe.schema import Optimizer
from stretto.training.optimizer import MasterAdamW
from stretto.training.trainer import Trainer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    """The folder in which a cell of two processes has left what it came to."""
    folder = tmp_path_factory.mktemp("cell")
    multiprocessing.start_processes(in_slices, (folder,), nprocs=SIZE, start_method="spawn")
    return folder


def alone(case):
    """The same on one device: reports, weights and the optimizer's state."""
    policy = policy_of(case)
    optimizer = MasterAdamW(policy.trained(), Optimizer(lr=0.01), updates=10)
    trainer = Trainer(policy, build(SECTION), optimizer, **CHOICES)
    reports = taken(trainer, copy.copy)
    weights = {name: weight.detach() for name, weight in policy.trained().items()}
    return reports, weights, optimizer.state()


PRECISION = {"full": 1e-10, "lora": 1e-10, "half precision": 2e-2}
"""Largest difference of a weight; an update of Adam's is as large as its rate, however small the gradient."""


@pytest.mark.parametrize("case", CASES)
def test_a_cell_of_two_trains_as_one_device_does(case, cell):
    told = torch.load(cell / f"{case}.pt")
    reports, weights, state = alone(case)
    exact = PRECISION[case] == 1e-10
    for mine, theirs in zip(told["reports"], reports, strict=True):
        assert mine.keys() == theirs.keys()
        assert mine == pytest.approx(theirs, rel=1e-9 if exact else 0.1, abs=1e-9 if exact else 0.1)
    assert told["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        assert told["weights"][name].dtype == weight.dtype
        assert float((told["weights"][name] - weight).abs().max()) < PRECISION[case]
        assert float((told["state"]["masters"][name] - state["masters"][name]).abs().max()) < PRECISION[case]
        for key, moment in state["moments"][name].items():
            assert told["state"]["moments"][name][key].shape == moment.shape
            assert torch.allclose(told["state"]["moments"][name][key], moment, atol=PRECISION[case])


@pytest.mark.parametrize("case", CASES)
def test_each_process_holds_half_and_a_restored_state_is_gone_on_from(case, cell):
    told = torch.load(cell / f"{case}.pt")
    assert 0.4 < told["held"] < 0.6
    assert told["again"] == told["reports"]
