"""Gradients added up in bfloat16: what rounding takes comes back, unless its update was skipped or is retried."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from crewed import alone, distance, together
from running import recipe_in
from stretto.training.rounded_sums import RoundedSums
from stretto.workers.process_group import ProcessGroup, Rendezvous
from tiny import CPU


class Lone:
    """A group of one device."""

    size = 1

    def exchange(self, rows):
        return rows.clone()


LONE = Lone()


def relative(one, other):
    return float((one - other).norm() / other.norm())


def reduced(steps, *, feedback):
    """What each device gets, update by update, of what each has."""
    store, size = HashStore(), len(steps[0])

    def member(rank):
        group = ProcessGroup(Rendezvous(store=store, name="here", rank=rank, size=size, seconds=30), CPU)
        sums, found = RoundedSums(feedback=feedback), []
        for step in steps:
            tensor = step[rank].clone()
            sums.over(group)(tensor)
            sums.updated(True)
            found.append(tensor)
        return found

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


@pytest.mark.parametrize("devices", [2, 3])
def test_with_feedback_errors_do_not_add_up_and_everybody_has_the_same_bits(devices):
    """The same gradients over and over are the worst case without: each update is wrong in the same direction."""
    draws = torch.Generator().manual_seed(0)
    steps = [[torch.randn(10_001, generator=draws) for _ in range(devices)]] * 32
    exact = 32 * torch.stack(steps[0]).double().sum(0)
    errors = []
    for feedback in (False, True):
        first, *others = reduced(steps, feedback=feedback)
        assert all(torch.equal(one, other) for found in others for one, other in zip(first, found, strict=True))
        errors.append(relative(torch.stack(first).double().sum(0), exact))
    assert 1e-3 < errors[0] < 6e-3
    assert errors[1] < errors[0] / 16


def test_a_single_update_is_off_by_what_bfloat16_rounds():
    ((gradient,),) = reduced([[torch.linspace(1, 2, 1000)]], feedback=True)
    assert 0 < relative(gradient, torch.linspace(1, 2, 1000)) < 2**-8


@pytest.mark.parametrize("applied", [False, True])
def test_what_a_skipped_update_rounded_is_gone_with_it(applied):
    sums, gradient = RoundedSums(), torch.full((3,), 1 + 2**-10)
    first = gradient if applied else torch.full((3,), float("inf"))
    sums.over(LONE)(first.clone())
    sums.updated(applied)
    tensor = torch.zeros(3)
    sums.over(LONE)(tensor)
    assert tensor.tolist() == [2**-10 * applied] * 3


def test_an_update_that_is_retried_takes_what_was_left_once_more():
    sums, gradient = RoundedSums(), torch.full((3,), 1 + 2**-10)
    sums.over(LONE)(gradient.clone())
    sums.updated(True)
    seen = []
    for _ in range(2):  # a device died while they were added up the first time
        tensor = gradient.clone()
        sums.over(LONE)(tensor)
        seen.append((tensor.tolist(), sums.next[0].own.tolist()))
    assert seen[0] == seen[1]


def test_several_tensors_keep_what_is_theirs():
    sums, two = RoundedSums(), [torch.full((2,), 1 + 2**-10), torch.full((5,), 3.0)]
    add = sums.over(LONE)
    for tensor in two:
        add(tensor.clone())
    sums.updated(True)
    assert [left.own.tolist() for left in sums.left] == [[2**-10] * 2, [0.0] * 5]


def test_a_run_of_two_devices_trains_on_rounded_sums_only_if_its_recipe_asks(tmp_path):
    reports, weights = {}, {}
    for reduce in ("exact", "bfloat16"):
        (tmp_path / reduce).mkdir()
        recipe = recipe_in(tmp_path / reduce, model__dtype="float32", optimizer__reduce=reduce)
        weights[reduce], reports[reduce], _ = asyncio.run(together(recipe, tmp_path / reduce, "flatten"))
    single, told = asyncio.run(alone(recipe_in(tmp_path, model__dtype="float32"), tmp_path))
    norm = told[0]["grad_norm"]
    assert reports["exact"][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert reports["bfloat16"][0]["grad_norm"] == pytest.approx(norm, rel=1e-2)
    assert distance(weights["exact"], single) < distance(weights["bfloat16"], single) < 0.06
