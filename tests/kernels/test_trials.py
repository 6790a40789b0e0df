"""What a trial says of a kernel."""

import math

import pytest
import torch

from stretto.kernels.trials import fault_of, largest_difference

GOOD = (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.1]))
NONE = (torch.tensor([3.0, 4.0]), torch.tensor([math.nan, 4.0]))


@pytest.mark.parametrize("pairs", [[NONE], [GOOD, NONE], [NONE, GOOD]], ids=["alone", "last", "first"])
def test_a_number_that_is_none_counts_wherever_it_comes(pairs):
    assert fault_of(lambda: largest_difference(pairs), 0.1) == "its result is off by inf"


def test_the_largest_difference_is_relative():
    assert largest_difference([GOOD, (GOOD[0], GOOD[0])]) == pytest.approx(0.1 / 5)
    assert fault_of(lambda: largest_difference([GOOD]), 0.1) is None
