"""Backward passes written by hand give the gradients of the stock layers, and only layers they fit have them."""

import copy

import pytest
import torch
from peft.tuners.lora import Linear as Adapted
from torch import nn
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rounding import rounding
from stretto.kernels.cpu import backward
from stretto.kernels.cpu.backward import take_over
from stretto.kernels.cpu.layer_kernels import layer_kernels
from stretto.models.lora import add_adapter
from stretto.recipe.schema import Adapter
from tiny import scratch_policy

GATED = LlamaConfig(hidden_size=8, intermediate_size=24, num_attention_heads=1)


def gradients(layer, states, outgoing):
    """Output, and gradients of the states and of every trained weight."""
    given = states.clone().requires_grad_()
    out = layer(given)
    trained = [weight for weight in layer.parameters() if weight.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, [given, *trained], outgoing)]


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["in C", "by torch"])
def kernels(request, monkeypatch):
    """Whether this machine has the kernels."""
    if request.param == "by torch":
        monkeypatch.setattr(backward, "layer_kernels", lambda dtype: None)
    else:
        assert layer_kernels(torch.float32) is not None
    return request.param


@pytest.mark.parametrize("numbers", [40, 1 << 18])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, rounding(torch.float32, 16)), (torch.bfloat16, rounding(torch.bfloat16, 1))]
)
def test_a_norm_has_the_gradients_of_the_stock_one(kernels, kind, dtype, close, numbers, monkeypatch):
    monkeypatch.setattr(backward, "CACHED_NUMBERS", numbers)
    stock = kind(16, eps=1e-4).to(dtype)
    with torch.no_grad():
        stock.weight.copy_(noise(16, seed=1) + 1)
    ours = copy.deepcopy(stock)
    take_over(nn.ModuleList([ours]))
    assert type(ours) is not kind and type(ours).__name__ == kind.__name__
    states, outgoing = noise(2, 70, 16, dtype=dtype), noise(2, 70, 16, seed=2, dtype=dtype)
    expected, found = (gradients(layer, states, outgoing) for layer in (stock, ours))
    assert kernels == "in C" or torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=close, atol=close)


def test_a_norm_over_states_that_need_no_gradient_is_trained(kernels):
    stock = LlamaRMSNorm(16)
    ours = copy.deepcopy(stock)
    take_over(nn.ModuleList([ours]))
    states, outgoing = noise(3, 16), noise(3, 16, seed=2)
    found, expected = (torch.autograd.grad(layer(states), [layer.weight], outgoing)[0] for layer in (ours, stock))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("trained", [["gate_proj"], ["up_proj"], ["gate_proj", "up_proj"]])
def test_either_side_of_a_gate_can_be_trained_alone(kernels, trained):
    """As adapters of the first layer are, which is given what is not trained."""
    stock = LlamaMLP(GATED)
    for name, weight in stock.named_parameters():
        weight.requires_grad_(name.split(".")[0] in trained)
    ours = copy.deepcopy(stock)
    take_over(nn.ModuleList([ours]))
    states, outgoing = noise(3, 8), noise(3, 8, seed=2)
    found, expected = (
        torch.autograd.grad(layer(states), [getattr(layer, name).weight for name in trained], outgoing)
        for layer in (ours, stock)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_norm_of_another_kind_keeps_its_own_backward():
    gemma, exact = GemmaRMSNorm(8), LlamaRMSNorm(8).double()
    take_over(nn.ModuleList([gemma, exact]))
    assert (type(gemma), type(exact)) == (GemmaRMSNorm, LlamaRMSNorm)


@pytest.mark.parametrize("numbers", [40, 1 << 18])
@pytest.mark.parametrize(
    ("dtype", "close"),
    [
        (torch.float64, 1e-12),
        (torch.float32, rounding(torch.float32, 8, 24, 24)),
        (torch.bfloat16, rounding(torch.bfloat16, 1, 1, 1)),  # sums are in fp32, and what comes out is rounded
    ],
)
def test_a_gated_layer_has_the_gradients_of_the_stock_one(kernels, dtype, close, numbers, monkeypatch):
    monkeypatch.setattr(backward, "CACHED_NUMBERS", numbers)
    torch.manual_seed(0)
    stock = LlamaMLP(GATED).to(dtype)
    ours = copy.deepcopy(stock)
    take_over(nn.ModuleList([ours]))
    assert type(ours) is not LlamaMLP and type(ours).__name__ == "LlamaMLP"
    states, outgoing = 3 * noise(2, 5, 8, dtype=dtype), noise(2, 5, 8, seed=2, dtype=dtype)
    expected, found = (gradients(layer, states, outgoing) for layer in (stock, ours))
    assert kernels == "in C" or torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=close, atol=close)
    with torch.no_grad():
        assert torch.equal(ours(states), found[0])


def test_a_gated_layer_of_another_kind_keeps_its_own_backward():
    gelu, twisted = LlamaMLP(LlamaConfig(**(GATED.to_dict() | {"hidden_act": "gelu"}))), LlamaMLP(GATED)
    twisted.down_proj = nn.Sequential(twisted.down_proj, nn.Tanh())
    take_over(nn.ModuleList([gelu, twisted]))
    assert (type(gelu), type(twisted)) == (LlamaMLP, LlamaMLP)


CLOSE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.01}
"""Type -> how far an adapter's gradients may be from those of the stock layer, which rounds more often."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [
        (torch.float64, "none"),
        (torch.float32, "none"),
        (torch.float64, "int8"),
        (torch.float32, "nf4"),
        (torch.bfloat16, "int8"),
    ],
)
def test_an_adapter_has_the_gradients_of_the_stock_one(dtype, quantize, bias):
    told = {"dtype": str(dtype).removeprefix("torch."), "quantize": quantize}
    policy = scratch_policy(**told, width=64, adapter=Adapter(rank=3, alpha=5))
    ours = next(layer for layer in policy.network.modules() if isinstance(layer, Adapted))
    with torch.no_grad():
        ours.lora_B["default"].weight.copy_(noise(*ours.lora_B["default"].weight.shape, seed=3))
    if bias:
        ours.base_layer.bias = nn.Parameter(noise(ours.out_features, dtype=dtype), requires_grad=False)
    stock = copy.deepcopy(ours)
    stock.__class__ = Adapted
    assert type(ours) is not Adapted
    states = noise(1, 7, ours.in_features, dtype=dtype)
    outgoing = noise(1, 7, ours.out_features, seed=1, dtype=dtype)
    expected, found = (gradients(layer, states, outgoing) for layer in (stock, ours))
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= CLOSE[dtype] * other.double().norm()


def test_what_an_adapter_s_first_layer_reads_needs_no_gradient():
    policy = scratch_policy(dtype="float32", width=32, adapter=Adapter(rank=3, alpha=5))
    layer = next(layer for layer in policy.network.modules() if isinstance(layer, Adapted))
    layer(noise(1, 7, layer.in_features)).sum().backward()
    assert layer.lora_B["default"].weight.grad is not None


def test_a_copy_of_a_model_reads_its_own_weights():
    policy = scratch_policy(dtype="float32", width=32, adapter=Adapter(rank=3, alpha=5))
    layer = next(layer for layer in policy.network.modules() if isinstance(layer, Adapted))
    twin, states = copy.deepcopy(layer), noise(1, 4, layer.in_features)
    before = twin(states)
    with torch.no_grad():
        layer.base_layer.weight.zero_()
    assert torch.equal(twin(states), before) and not torch.equal(layer(states), before)


def test_adapters_with_dropout_or_other_arithmetic_keep_their_own_passes():
    policy = scratch_policy(dtype="float32", width=32)
    add_adapter(policy.network, Adapter(rank=2, alpha=2), seed=0)
    layer = next(layer for layer in policy.network.modules() if isinstance(layer, Adapted))
    layer.lora_dropout["default"] = nn.Dropout(0.1)
    assert not backward.simple(layer)
    layer.lora_dropout["default"] = nn.Identity()
    assert backward.simple(layer)
    layer.base_layer.weight.requires_grad_(True)
    assert not backward.simple(layer)
