"""Cells of processes that hold slices of a model: they train as one device does, and their state is one device's."""

import copy
from functools import cache

import pytest
import torch

from processes import run_together
from slices import CASES, GRIDS, RUNS, SECTION, in_slices, policy_of, section_of, settings_of, taken
from stretto.algorithms.base import build
from stretto.training.narrow_adamw import make_optimizer
from stretto.training.optimizer import wide_master
from stretto.training.trainer import Trainer
from tiny import learned

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Number of processes -> the folder in which cells of so many have left what they came to, made when asked for."""

    @cache
    def of(size):
        folder = tmp_path_factory.mktemp("cell")
        run_together(in_slices, size, folder, size)
        return folder

    return of


@pytest.fixture
def cell(cells, grid):
    """The folder of the cells that a grid is among."""
    return cells(GRIDS[grid][0])


def alone(case, grid):
    """The same on one device: reports, weights and the optimizer's state."""
    policy = policy_of(case, grid)
    optimizer = make_optimizer(policy.trained(), section_of(case), updates=10)
    trainer = Trainer(policy, build(SECTION), optimizer, **settings_of(case))
    reports = taken(trainer, copy.copy)
    weights = {name: weight.detach() for name, weight in policy.trained().items()}
    return reports, weights, optimizer.state()


HELD = {"matrices": (0.4, 0.9), "experts of the same rows": (0.4, 0.9)} | dict.fromkeys(
    ("shards and matrices", "shared heads", "shards and experts", "matrices and experts"), (0.2, 0.5)
)
"""The share of a model that a process has: of matrices a part, and of the rest all or as much as shards leave."""

EXACT = 1e-10
PRECISION = dict.fromkeys(CASES, EXACT) | {"half precision": 2e-2, "adamw8bit": 1e-6, "adamw16bit": 1e-6}
"""Difference of a weight; an update of Adam's is as large as its rate, however small the gradient. In few bits a
difference in the last bit of a sum may tip a number over to the next code, so there it is that of 99 weights of 100."""
ROUNDED = {("matrices", "half precision"): 5e-3}
"""Parts of a sum in bf16 are rounded before they are added up: the difference of 9 weights of 10."""


def apart(one, other, case, grid):
    """How far two tensors differ."""
    off = (one - other).abs().double().flatten()
    share = 0.9 if (grid, case) in ROUNDED else 0.99 if case.startswith("adamw") else 1.0
    return float(off.quantile(share))


@pytest.mark.parametrize(("grid", "case"), RUNS)
def test_a_cell_trains_as_one_device_does(grid, case, cell):
    told = torch.load(cell / f"{grid} {case}.pt")
    reports, weights, state = alone(case, grid)
    # A gradient that is rounding alone moves its weight by Adam's whole rate, and the next gradient with it.
    close = 1e-9 if PRECISION[case] == EXACT else 5e-4 if case.startswith("adamw") else 0.1
    for mine, theirs in zip(told["reports"], reports, strict=True):
        assert mine.keys() == theirs.keys()
        assert learned(mine) == pytest.approx(learned(theirs), rel=close, abs=close)
    assert told["weights"].keys() == weights.keys()
    most = ROUNDED.get((grid, case), PRECISION[case])
    if case.startswith("adamw") and grid != "shards":
        most *= 5  # products of fp32 are summed in parts
    for name, weight in weights.items():
        assert told["weights"][name].dtype == weight.dtype
        master = told["state"]["masters"][name]
        if (grid, case) in ROUNDED:  # near 1 they lie 0.008 apart: that they are their wide ones, which are compared
            assert torch.equal(told["weights"][name], master.to(weight.dtype))
        else:
            assert apart(told["weights"][name], weight, case, grid) < most
        assert apart(master, wide_master(state["masters"][name]), case, grid) < most
        for key, moment in state["moments"][name].items():
            found = told["state"]["moments"][name][key]
            assert (found.shape, found.dtype) == (moment.shape, moment.dtype)
            if moment.is_floating_point():
                assert torch.allclose(found.double(), moment.double(), rtol=1e-2, atol=PRECISION[case])
            else:
                assert (found != moment).double().mean() < 0.01


@pytest.mark.parametrize(("grid", "case"), RUNS)
def test_each_process_holds_a_part_and_a_restored_state_is_gone_on_from(grid, case, cell):
    told = torch.load(cell / f"{grid} {case}.pt")
    least, most = HELD.get(grid, (0.4, 0.6))
    assert least < told["held"] < most
    assert list(map(learned, told["again"])) == list(map(learned, told["reports"]))
