"""Who has which parameters of an optimizer that is shared, and how the parts become one state again."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as given_by
from torch import nn

from stretto.recipe.schema import Optimizer
from stretto.training.narrow_adamw import make_optimizer
from stretto.training.parallel.zero1 import merge_states, partition


def parameters(sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    made = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return {f"w{index}": nn.Parameter(weight) for index, weight in enumerate(made)}


@given(sizes=given_by.lists(given_by.integers(0, 200), min_size=1, max_size=30), count=given_by.integers(1, 9))
def test_every_parameter_is_dealt_once_and_no_part_is_larger_than_an_equal_one_by_more_than_a_parameter(sizes, count):
    dealt = parameters(sizes)
    parts = partition(dealt, count)
    assert len(parts) == count
    assert [name for part in parts for name in part] == list(dealt), "in their order"
    assert all(weight is dealt[name] for part in parts for name, weight in part.items())
    most = max(sum(weight.numel() for weight in part.values()) for part in parts)
    assert most <= sum(sizes) / count + max(sizes)


def test_many_layers_make_parts_of_almost_one_size():
    layer = [64, 16, 16, 64, 176, 176, 176]
    dealt = parameters([1000, *layer * 24, 1000])
    for count in (2, 3, 4, 8):
        sizes = [sum(weight.numel() for weight in part.values()) for part in partition(dealt, count)]
        assert max(sizes) < 1.05 * sum(sizes) / count


def test_a_deal_of_more_parts_than_parameters_leaves_some_empty():
    parts = partition(parameters([3, 5]), 4)
    assert [list(part) for part in parts] == [["w0"], [], ["w1"], []]


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adamw16bit"])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_parts_step_like_the_whole_and_their_states_put_together_are_its_state(name, count):
    sizes, section = (5000, 40, 4096, 7), Optimizer(lr=0.01, name=name, weight_decay=0.1)
    together, dealt = (parameters(sizes, torch.bfloat16) for _ in range(2))
    one = make_optimizer(together, section, updates=6)
    several = [make_optimizer(part, section, updates=6) for part in partition(dealt, count)]
    for update in range(6):
        if update == 3:  # as if the run had gone on under another number of cells
            state = merge_states([copy.deepcopy(each.state()) for each in several])
            assert list(state["masters"]) == list(state["moments"]) == list(together)
            several = [make_optimizer(part, section, updates=6) for part in partition(dealt, 3)]
            for each in several:
                each.restore(state)
        generator = torch.Generator().manual_seed(update)
        found = {key: torch.randn(weight.shape, generator=generator) for key, weight in together.items()}
        rate = one.step({key: gradient.clone() for key, gradient in found.items()})
        assert {each.step(found) for each in several} == {rate}
    for key, weight in together.items():
        assert torch.equal(weight, dealt[key]), key


def test_slices_of_a_parameter_are_put_together_and_numbers_are_the_same_everywhere():
    def part(first, last):
        held = {"step": torch.tensor(3.0), "exp_avg": torch.arange(first, last)}
        return {"update": 3, "masters": {"w": torch.arange(first, last)[:, None]}, "moments": {"w": held}}

    state = merge_states([part(0, 3), part(3, 5), part(5, 5)])
    assert state["update"] == 3
    assert state["masters"]["w"].tolist() == [[0], [1], [2], [3], [4]]
    assert {key: value.tolist() for key, value in state["moments"]["w"].items()} == {
        "step": 3.0,
        "exp_avg": [0, 1, 2, 3, 4],
    }


def test_devices_in_turn_have_neighboring_parameters():
    names = [[int(name[1:]) for name in part] for part in partition(parameters([10] * 12), 4)]
    assert all(later == earlier + 1 for part in names for earlier, later in pairwise(part))
