"""AdamW over wide masters: what it computes, what it keeps, and the course of its learning rate."""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from stretto.errors import CheckpointError
from stretto.recipe.schema import Optimizer
from stretto.training.optimizer import MasterAdamW, learning_rate


def weights(dtype, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"first": (5, 3), "second": (4,)}
    return {name: nn.Parameter(torch.randn(*s, generator=generator).to(dtype)) for name, s in shapes.items()}


def gradients(parameters, *, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*w.shape, generator=generator).to(dtype) for name, w in parameters.items()}


SECTION = Optimizer(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, warmup=3, schedule="cosine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_torchs_adamw(dtype):
    mine, theirs = weights(dtype), weights(dtype)
    optimizer = MasterAdamW(mine, SECTION, updates=10)
    adamw = torch.optim.AdamW(theirs.values(), betas=(0.9, 0.95), weight_decay=0.1)
    for update in range(10):
        found = gradients(mine, seed=update, dtype=dtype)
        rate = optimizer.step(found)
        for name, weight in theirs.items():
            weight.grad = found[name].clone()
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-6, atol=1e-7)
        assert mine[name].grad is None


def test_the_first_update_is_what_one_computes_by_hand():
    weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = MasterAdamW({"w": weight}, Optimizer(lr=0.1, betas=(0.9, 0.95), weight_decay=0.5), updates=1)
    assert optimizer.step({"w": torch.tensor([3.0, -0.25], dtype=torch.float64)}) == 0.1
    # decay 1 - 0.1 * 0.5; both moments, corrected for their start, give g / sqrt(g^2) = sign(g)
    by_hand = [1.0 * 0.95 - 0.1 * 3.0 / (3.0 + 1e-8), -2.0 * 0.95 + 0.1 * 0.25 / (0.25 + 1e-8)]
    assert weight.tolist() == pytest.approx(by_hand, rel=1e-12)


def test_many_updates_too_small_for_bf16_add_up():
    lost, kept = weights(torch.bfloat16), weights(torch.bfloat16)
    start = {name: weight.detach().clone() for name, weight in kept.items()}
    section = Optimizer(lr=1e-5)
    optimizer = MasterAdamW(kept, section, updates=200)
    narrow = torch.optim.AdamW(lost.values(), lr=1e-5, weight_decay=0.0)
    ones = {name: torch.ones(weight.shape) for name, weight in kept.items()}
    for _ in range(200):
        optimizer.step(ones)
        for weight in lost.values():
            weight.grad = torch.ones_like(weight)
        narrow.step()
    for name, weight in kept.items():
        moved = start[name].float() - optimizer.masters[name]
        torch.testing.assert_close(moved, torch.full_like(moved, 200 * 1e-5), rtol=0.01, atol=1e-6)
        assert torch.equal(weight, optimizer.masters[name].to(torch.bfloat16))
        large = start[name].abs() > 0.5
        assert torch.equal(lost[name][large], start[name][large]), "bf16 alone would have lost every step"
    assert not torch.equal(kept["first"], start["first"])


def test_wide_parameters_are_their_own_masters():
    for dtype in (torch.float32, torch.float64):
        parameters = weights(dtype)
        optimizer = MasterAdamW(parameters, SECTION, updates=1)
        assert all(optimizer.masters[name] is weight for name, weight in parameters.items())
    narrow = MasterAdamW(weights(torch.bfloat16), SECTION, updates=1)
    assert {master.dtype for master in narrow.masters.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "adamw8bit"}, "holds the moments of adamw8bit, and optimizer.name is adamw"),
        ({"masters": {}}, "the checkpoint lacks it"),
        ({"masters": {name: torch.zeros(1) for name in ("first", "second")}}, r"the checkpoint has it as \(1,\)"),
    ],
)
def test_what_another_optimizer_or_model_has_left_is_refused(change, told):
    parameters = weights(torch.float32)
    optimizer = MasterAdamW(parameters, SECTION, updates=8)
    before = {name: weight.clone() for name, weight in parameters.items()}
    with pytest.raises(CheckpointError, match=told):
        optimizer.restore(optimizer.state() | change)
    assert all(torch.equal(weight, before[name]) for name, weight in parameters.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_restored_optimizer_goes_on_bitwise(dtype):
    parameters = weights(dtype)
    optimizer = MasterAdamW(parameters, SECTION, updates=8)
    wide = optimizer.masters["first"].dtype
    for update in range(4):
        optimizer.step(gradients(parameters, seed=update, dtype=wide))
    saved = copy.deepcopy(optimizer.state())
    again = weights(dtype, seed=9)
    restored = MasterAdamW(again, SECTION, updates=8)
    restored.step(gradients(again, seed=77, dtype=wide))
    restored.restore(saved)
    for name, weight in parameters.items():
        assert torch.equal(again[name], weight)
    for update in range(4, 8):
        found = gradients(parameters, seed=update, dtype=wide)
        assert optimizer.step(found) == restored.step(found)
    for name, weight in parameters.items():
        assert torch.equal(again[name], weight)
        assert torch.equal(restored.masters[name], optimizer.masters[name])


def test_the_state_of_an_optimizer_that_has_not_stepped_restores_one_that_has():
    fresh, used = weights(torch.float32), weights(torch.float32)
    first, second = MasterAdamW(fresh, SECTION, updates=8), MasterAdamW(used, SECTION, updates=8)
    saved = copy.deepcopy(first.state())
    second.step(gradients(used, seed=1))
    second.restore(saved)
    found = gradients(fresh, seed=2)
    first.step(found)
    second.step(found)
    for name, weight in fresh.items():
        assert torch.equal(used[name], weight)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, *(0.5 * (1 + math.cos(math.pi * done / 8)) for done in range(8))]),
    ],
)
def test_the_rate_rises_over_the_warm_up_and_then_follows_its_schedule(schedule, rates):
    section = Optimizer(lr=2.0, warmup=4, schedule=schedule)
    found = [learning_rate(section, update=update, updates=12) for update in range(12)]
    assert found == pytest.approx([2.0 * rate for rate in rates], rel=1e-12)


def test_without_warm_up_the_first_update_has_the_whole_rate_and_a_cosine_ends_near_zero():
    section = Optimizer(lr=1.0, schedule="cosine")
    assert learning_rate(section, update=0, updates=4) == 1.0
    assert learning_rate(section, update=2, updates=4) == pytest.approx(0.5)
    assert learning_rate(section, update=4, updates=4) == pytest.approx(0.0)
    assert learning_rate(section, update=400, updates=4) == pytest.approx(0.0), "it does not rise again"


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("updates", [1, 2, 5, 40])
def test_a_cosine_is_that_of_transformers_and_wastes_no_update_at_a_rate_of_zero(updates, warmup):
    """Theirs counts the warm-up from 0, which wastes the first update; from its end on the two are one."""
    section = Optimizer(lr=1.0, schedule="cosine", warmup=warmup)
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    (theirs,) = get_cosine_schedule_with_warmup(plain, warmup, updates).lr_lambdas
    for update in range(updates):
        rate = learning_rate(section, update=update, updates=updates)
        assert rate > 0
        if update >= warmup:
            assert rate == pytest.approx(theirs(update), rel=1e-12)


def test_the_rates_of_the_reference_page():
    section = Optimizer(lr=1.0, schedule="cosine")
    found = [learning_rate(section, update=update, updates=4) for update in range(4)]
    assert found == pytest.approx([1, 0.8536, 0.5, 0.1464], abs=5e-5)


def test_a_warm_up_longer_than_the_run_only_rises():
    section = Optimizer(lr=1.0, warmup=10, schedule="cosine")
    assert [learning_rate(section, update=u, updates=3) for u in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def test_a_rate_of_zero_moves_nothing():
    parameters = weights(torch.float32)
    before = copy.deepcopy(parameters)
    optimizer = MasterAdamW(parameters, Optimizer(lr=0.0, weight_decay=0.5), updates=3)
    optimizer.step(gradients(parameters, seed=1))
    for name, weight in parameters.items():
        assert torch.equal(weight, before[name])
