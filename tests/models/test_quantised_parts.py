"""Parts of matrices in few bits have the weights of the whole to the bit, wherever edges fall, and few more bytes."""

import pytest
import torch
from torch import nn

from stretto.models.parameter_cut import ParameterCut
from stretto.models.quantised import QuantisedExperts, QuantisedLinear
from stretto.models.quantised_parts import PartByRuns, keep_part
from tiny import CPU

CUTS = [
    ((128, 256), {"dim": 0, "size": 2}),
    ((128, 256), {"dim": 1, "size": 2}),
    ((512, 192), {"dim": 0, "size": 8}),
    ((320, 640), {"dim": 1, "size": 5}),
    ((512, 256), {"dim": 0, "size": 4, "blocks": 2}),
    ((64, 32), {"dim": 1, "size": 2}),
    ((48, 32), {"dim": 0, "size": 2}),
    ((24, 12), {"dim": 0, "size": 3}),
    ((24, 12), {"dim": 1, "size": 2}),
    ((24, 20), {"dim": 0, "size": 2, "blocks": 2}),
    ((3, 10), {"dim": 1, "size": 2}),
    ((4, 608), {"dim": 1, "size": 2}),
]
"""Shapes and cuts. Scales of NF4 lie in groups of 256 blocks of 64 weights, which 320 x 640 weights do not fill; edges
of the last ones fall into blocks, and between two codes of a byte."""


def layer_of(shape, kind):
    """A layer in few bits, whose scales differ much."""
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], bias=False)
    with torch.no_grad():
        layer.weight.mul_(torch.rand(shape).square() * torch.logspace(-2, 1, shape[0])[:, None])
    return QuantisedLinear(layer, kind, CPU)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize(("shape", "how"), CUTS)
def test_a_part_is_read_as_the_whole_is(kind, shape, how):
    whole = layer_of(shape, kind).wide(torch.float32)
    assert whole.unique().numel() > min(100, whole.numel() / 10), "or all would be alike"
    for rank in range(how["size"]):
        cut, layer = ParameterCut(**how, rank=rank), layer_of(shape, kind)
        keep_part(layer, cut)
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(layer.wide(dtype), cut.part(whole).to(dtype))
            assert layer.wide(dtype).is_contiguous()


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
def test_where_widths_are_whole_blocks_a_part_takes_its_share_of_the_bytes(kind):
    for how in ({"dim": 0, "size": 4}, {"dim": 1, "size": 4}):
        layer = layer_of((512, 1024), kind)
        before = layer.weight.nbytes, layer.scales.nbytes
        keep_part(layer, ParameterCut(**how, rank=1))
        assert layer.weight.nbytes == before[0] / 4
        most = {"nf4": before[0] / 30 / 4 + 4 * 33, "int8": before[1], "fp8": before[1]}[kind]
        assert layer.scales.nbytes <= (most if kind == "nf4" or how["dim"] else most / 4)


@pytest.mark.parametrize(
    ("shape", "how", "run"),
    [
        ((4096, 4096), {"dim": 0, "size": 8}, 64),
        ((5120, 25600), {"dim": 1, "size": 8}, 64),
        ((896, 4864), {"dim": 1, "size": 8}, 32),
        ((24, 12), {"dim": 1, "size": 2}, 2),
        ((3, 10), {"dim": 1, "size": 2}, 1),
    ],
)
def test_runs_are_as_long_as_edges_leave_them(shape, how, run):
    assert PartByRuns(shape=shape, cut=ParameterCut(**how, rank=0)).run == run


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_each_expert_is_cut_alike_and_a_copy_is_told_from_its_part(kind):
    torch.manual_seed(0)
    stack = QuantisedExperts(torch.randn(3, 40, 24), kind, CPU)
    whole = [stack[index].wide(torch.float32) for index in range(3)]
    full = {name: weight.detach().clone() for name, weight in stack.named_parameters()}
    cut = ParameterCut(dim=0, size=2, blocks=2, rank=1)
    ways = keep_part(stack, cut)
    assert all(torch.equal(stack[index].wide(torch.float32), cut.part(whole[index])) for index in range(3))
    for name, held in stack.named_parameters():
        assert torch.equal(ways[name](full[name]), held)
    full["weight"][1] ^= 16
    assert not torch.equal(ways["weight"](full["weight"]), stack.weight)
