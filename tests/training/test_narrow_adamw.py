"""AdamW in little memory: what is kept of masters and moments, and that nothing else of an update changes."""

import copy

import pytest
import torch
from torch import nn

from stretto.errors import RecipeError
from stretto.kernels.bits import joined, noise_of, parted
from stretto.models.parameter_cut import ParameterCut
from stretto.recipe.schema import Optimizer
from stretto.training.narrow_adamw import (
    FIRST,
    SECOND,
    Half,
    NarrowAdamW,
    Quarter,
    make_optimizer,
)
from stretto.training.narrow_blocks import block_of
from stretto.training.optimizer import MasterAdamW, Place
from stretto.training.parallel.zero1 import merge_states

NARROW = ["adamw16bit", "adamw8bit"]
SECTION = Optimizer(lr=0.01, warmup=3, schedule="cosine", weight_decay=0.1)
CPU = torch.device("cpu")


def named(name, **changes):
    return SECTION.model_copy(update={"name": name, **changes})


def weights(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return {f"w{i}": nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for i, shape in enumerate(shapes)}


def gradients(parameters, seed):
    """Some numbers of a row are far larger than others, as in a model."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: torch.logspace(-3, 0, weight.shape[-1]) for name, weight in parameters.items()}
    return {
        name: (torch.randn(weight.shape, generator=generator) + 0.3) * sizes[name]
        for name, weight in parameters.items()
    }


def test_a_master_in_two_halves_is_the_master_but_for_the_last_bit_between_two_weights():
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    ties = (bits & -65536) | 0x8000
    master = torch.cat([bits, ties, torch.tensor([0, 1, -(2**31)], dtype=torch.int32)]).view(torch.float32)
    master = master[master.isfinite() & master.to(torch.bfloat16).isfinite()]
    weight, rest = parted(master)
    assert torch.equal(weight, master.to(torch.bfloat16))
    again = joined(weight, rest)
    assert torch.equal(again.to(torch.bfloat16), weight)
    off = (again.view(torch.int32) - master.view(torch.int32)).abs()
    between = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert int(off.max()) == 1
    assert not off[~between].any()
    assert off[between].any()


def test_with_wide_moments_every_update_is_that_of_wide_masters():
    plain, split = (weights(torch.bfloat16, (50, 60), (70,)) for _ in range(2))
    wide = MasterAdamW(plain, named("adamw", lr=1e-4), updates=60)
    narrow = make_optimizer(split, named("adamw8bit", lr=1e-4), updates=60)
    assert isinstance(narrow, NarrowAdamW)
    for update in range(60):
        found = gradients(plain, update)
        assert wide.step(copy.deepcopy(found)) == narrow.step(found)
    for name, weight in plain.items():
        assert torch.equal(split[name], weight)
        assert torch.allclose(narrow.masters[name], wide.masters[name], rtol=1e-6, atol=0)
        assert not torch.equal(wide.masters[name], weight.float()), "halves have something to lose"


@pytest.mark.parametrize(("name", "bytes_each", "off"), [("adamw16bit", 6, 0.05), ("adamw8bit", 4.1, 0.15)])
def test_narrow_moments_move_weights_almost_as_wide_ones_do(name, bytes_each, off):
    plain, other = (weights(torch.bfloat16, (96, 192)) for _ in range(2))
    before = plain["w0"].detach().float()
    wide, narrow = MasterAdamW(plain, named("adamw"), updates=40), make_optimizer(other, named(name), updates=40)
    for update in range(40):
        found = gradients(plain, update)
        wide.step(copy.deepcopy(found))
        narrow.step(found)
    moved = wide.masters["w0"] - before
    assert (narrow.masters["w0"] - wide.masters["w0"]).norm() < off * moved.norm()
    assert sum(tensor.nbytes for tensor in narrow.tensors()) <= bytes_each * other["w0"].numel()


@pytest.mark.parametrize(
    ("average", "shares"), [(FIRST, (1e-6, 1e-5, 1e-4, 0.01, 0.3)), (SECOND, (1e-9, 1e-7, 1e-4, 0.3))]
)
@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_eight_bits_have_the_mean_of_the_moment_and_not_of_its_root(average, shares, scale):
    """20,000 roundings of each share of a block's largest number, of both signs in the first average."""
    storage, rows = Quarter(256), 20_000
    for sign in (1, -1) if average is FIRST else (1,):
        wide = torch.zeros(rows, 256)
        wide[:, : len(shares)], wide[:, -1] = sign * torch.tensor(shares) * scale, scale
        stored = storage.fresh(average, wide.shape, CPU)
        noise, _ = noise_of(torch.arange(wide.numel()).view(wide.shape), 7)
        storage.write(average, stored, slice(0, rows), wide, noise)
        read = storage.read(average, stored, slice(0, rows)).double()
        off = read.std(0)[: len(shares)] / rows**0.5
        assert ((read.mean(0) - wide[0])[: len(shares)].abs() <= 5 * off + 1e-6 * wide[0, : len(shares)].abs()).all()
        assert (read[:, -1] == wide[0, -1]).all() and not read[:, len(shares) : -1].any()


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_goes_on_exactly_where_its_state_was_taken(name, dtype):
    straight, resumed = (weights(dtype, (64, 128), (5, 3), (4,)) for _ in range(2))
    first, second = (make_optimizer(each, named(name), updates=6) for each in (straight, resumed))
    for update in range(6):
        if update == 3:
            second.restore(copy.deepcopy(first.state()))
        found = gradients(straight, update)
        first.step(copy.deepcopy(found))
        if update >= 3:
            second.step(found)
    assert all(torch.equal(weight, resumed[key]) for key, weight in straight.items())
    assert all(torch.equal(first.masters[key], second.masters[key]) for key in straight)


@pytest.mark.parametrize("name", NARROW)
def test_slices_make_the_state_of_the_whole_to_the_bit(name):
    whole = weights(torch.float32, (67, 128), (4096,), (5, 33, 64))
    cuts = [slice(0, 3), slice(3, 40), slice(40, None)]
    parts = [{key: nn.Parameter(weight.detach()[cut].clone()) for key, weight in whole.items()} for cut in cuts]
    places = [{key: Place(shape=weight.shape, first=cut.start) for key, weight in whole.items()} for cut in cuts]
    one = make_optimizer(whole, named(name), updates=5)
    several = [make_optimizer(p, named(name), updates=5, places=at) for p, at in zip(parts, places, strict=True)]
    for update in range(5):
        found = gradients(whole, update)
        for cut, each in zip(cuts, several, strict=True):
            each.step({key: gradient[cut].clone() for key, gradient in found.items()})
        one.step(found)
    state = one.state()["moments"]
    held = [each.state()["moments"] for each in several]
    for key, weight in whole.items():
        close = torch.equal if weight.dim() > 1 else torch.allclose  # a vector's last numbers are computed one by one
        assert close(torch.cat([part[key].detach() for part in parts]), weight.detach())
        for kind, moment in state[key].items():
            assert close(torch.cat([each[key][kind] for each in held]), moment), (key, kind)


CUTS = {"w0": {"dim": 1}, "w1": {"dim": 1, "blocks": 2}, "w2": {"dim": 0}, "w3": {"dim": 2}}
"""Of parameters that two processes share: one by its columns, gates and ups in one, one by its rows, and experts."""


@pytest.mark.parametrize("name", NARROW)
def test_parts_of_matrices_make_the_state_of_the_whole_to_the_bit(name):
    whole = weights(torch.float32, (67, 512), (5, 64, 128), (68, 128), (4, 3, 1024))
    cuts = [{key: ParameterCut(**how, rank=rank, size=2) for key, how in CUTS.items()} for rank in range(2)]
    parts = [{key: nn.Parameter(mine[key].part(each.detach()).clone()) for key, each in whole.items()} for mine in cuts]
    places = [{key: Place(shape=whole[key].shape, cut=cut) for key, cut in mine.items()} for mine in cuts]
    one = make_optimizer(whole, named(name), updates=5)
    several = [make_optimizer(p, named(name), updates=5, places=at) for p, at in zip(parts, places, strict=True)]
    for update in range(5):
        found = gradients(whole, update)
        for mine, each in zip(cuts, several, strict=True):
            each.step({key: mine[key].part(gradient).clone() for key, gradient in found.items()})
        one.step(found)
    joined_state, state = merge_states([each.state() for each in several]), one.state()
    for key, weight in whole.items():
        assert torch.equal(joined_state["masters"][key], weight)
        for kind, moment in state["moments"][key].items():
            assert torch.equal(joined_state["moments"][key][kind], moment), (key, kind)


def test_numbers_that_share_a_scale_are_not_cut_apart():
    cut = ParameterCut(dim=1, rank=0, size=2)
    part = {"w0": nn.Parameter(torch.zeros(64, 64))}
    place = {"w0": Place(shape=torch.Size((64, 128)), cut=cut)}
    make_optimizer(part, named("adamw16bit"), updates=5, places=place)
    with pytest.raises(RecipeError, match="w0 is cut into pieces of 64 numbers, and 128 share a scale"):
        make_optimizer(part, named("adamw8bit"), updates=5, places=place)


@pytest.mark.parametrize("storage", [Half(), Quarter(64)], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("average", [FIRST, SECOND], ids=["first", "second"])
def test_rounding_has_the_right_mean_and_a_positive_average_stays_positive(storage, average):
    generator = torch.Generator().manual_seed(2)
    wide = torch.randn(4, 64, generator=generator) * torch.logspace(-2, 0, 64)
    wide = wide.square() if average is SECOND else wide
    stored = storage.fresh(average, wide.shape, CPU)
    total = torch.zeros_like(wide)
    for seed in range(2000):
        noise = noise_of(torch.arange(wide.numel()).view(wide.shape), seed * 7919)[average is SECOND]
        storage.write(average, stored, slice(0, 4), wide.clone(), noise)
        total += storage.read(average, stored, slice(0, 4))
        if average is SECOND:
            assert (storage.read(average, stored, slice(0, 4)) > 0).all()
    mean, largest = total / 2000, wide.abs().amax(1, keepdim=True)
    assert ((mean - wide).abs() / (wide.abs() + 1e-3 * largest)).mean() < (1e-3 if isinstance(storage, Half) else 0.05)


def test_noise_is_even_and_its_halves_have_nothing_in_common():
    one, other = noise_of(torch.arange(123, 200_123), 99)
    for noise in (one, other):
        assert abs(float(noise.mean()) - 0.5) < 0.005
        assert abs(float(noise.var()) - 1 / 12) < 0.002
        assert abs(float(torch.corrcoef(torch.stack([noise[1:], noise[:-1]]))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.01
    assert torch.equal(noise_of(torch.arange(1123, 1173), 99)[0], one[1000:1050])


@pytest.mark.parametrize(("width", "block"), [(576, 192), (1536, 256), (4096, 256), (896, 224), (257, 1), (64, 64)])
def test_blocks_divide_a_row(width, block):
    assert block_of(width) == block
