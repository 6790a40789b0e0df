"""A critic that a cell trains in slices learns as on one device, and what is frozen and cut says the same."""

import numpy as np
import pytest
import torch

from processes import run_together
from sliced_models import CRITICS, FROZEN, WORLD, alone, frozen, in_slices, talks
from stretto.training.optimizer import wide_master

pytestmark = pytest.mark.slow

CLOSE = dict.fromkeys(CRITICS, 1e-10) | {"half precision": 2e-2}


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The folder in which two cells of two processes have left what they came to."""
    folder = tmp_path_factory.mktemp("cells")
    run_together(in_slices, WORLD, folder)
    return folder


@pytest.mark.parametrize("case", CRITICS)
def test_a_critic_in_slices_learns_as_on_one_device(case, cells):
    told = torch.load(cells / f"{case}.pt", weights_only=False)
    reports, values, weights, state = alone(case)
    close = CLOSE[case]
    for mine, theirs in zip(told["reports"], reports, strict=True):
        assert mine.keys() == theirs.keys() and theirs["critic/grad_norm"] > 0
        assert mine == pytest.approx(theirs, rel=10 * close, abs=10 * close)
    for mine, theirs in zip(told["values"], values, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=10 * close)
    assert told["weights"].keys() == weights.keys()
    for name, weight in weights.items():
        assert told["weights"][name].dtype == weight.dtype
        assert float((told["weights"][name] - weight).abs().max()) < close
        assert torch.allclose(told["state"]["masters"][name], wide_master(state["masters"][name]), rtol=0, atol=close)
        for key, moment in state["moments"][name].items():
            assert torch.allclose(told["state"]["moments"][name][key], moment, rtol=1e-2, atol=close), (name, key)


@pytest.mark.parametrize("case", CRITICS)
def test_each_process_holds_half_of_it_and_goes_on_from_a_state(case, cells):
    told = torch.load(cells / f"{case}.pt", weights_only=False)
    assert all(0.4 < held / sum(told["held"]) < 0.6 for held in told["held"])
    assert told["again"] == told["reports"]


@pytest.mark.parametrize("case", FROZEN)
def test_a_frozen_model_in_slices_says_what_it_says_on_one_device(case, cells):
    told, model = torch.load(cells / f"{case}.pt", weights_only=False), frozen(case)
    expected = model.score(talks())
    assert np.ptp(np.concatenate([numbers.ravel() for numbers in expected])) > 0.01
    for mine, theirs in zip(told["numbers"], expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-10)
    assert all(0.4 < held / sum(told["held"]) < 0.6 for held in told["held"])
