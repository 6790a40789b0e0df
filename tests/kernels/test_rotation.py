"""Heads are rotated as the network's own function does it, and by a kernel only where that is the same."""

import copy
from functools import partial, wraps
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    CohereConfig,
    GptOssConfig,
    LlamaConfig,
    ModernBertDecoderConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.modernbert_decoder.modeling_modernbert_decoder import ModernBertDecoderAttention
from transformers.models.phi3.modeling_phi3 import Phi3Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

from rounding import rounding
from stretto.kernels.cpu import rotation
from stretto.kernels.cpu.backward import take_over
from stretto.kernels.cpu.rotation import has_plain_rotary, rotated

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
WIDE = {"hidden_size": 32, "num_attention_heads": 4}


def behind_a_decorator(attention):
    """The class with a forward like those whose arguments have new names."""

    @wraps(attention.forward)
    def forward(self, *given, **more):
        return wrapped(self, *given, **more) if given else never

    wrapped = attention.forward
    if not wrapped:
        never = None  # a closure may hold nothing
    return type(attention.__name__, (attention,), {"forward": forward})


LAYERS = {
    "llama": lambda: LlamaAttention(LlamaConfig(**SIZES), 0),
    "llama behind a decorator": lambda: behind_a_decorator(LlamaAttention)(LlamaConfig(**SIZES), 0),
    "qwen3": lambda: Qwen3Attention(Qwen3Config(**SIZES), 0),
    "qwen3 with experts": lambda: Qwen3MoeAttention(Qwen3MoeConfig(**SIZES), 0),
    "phi3, with one product of all heads": lambda: Phi3Attention(Phi3Config(**SIZES, pad_token_id=0), 0),
}
OTHERS = {
    "cohere, which rotates neighbors": lambda: CohereAttention(CohereConfig(**SIZES), 0),
    "modernbert's decoder, which rounds once": lambda: ModernBertDecoderAttention(ModernBertDecoderConfig(**WIDE), 0),
    "gpt-oss, with angles of half the size": lambda: GptOssAttention(GptOssConfig(**SIZES), 0),
    "no attention": lambda: nn.Linear(2, 2),
}
TOKENS = 12


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outcome(layer, dtype):
    """What a layer gives, and gradients of the states and of its weights."""
    states = noise(1, TOKENS, 32, dtype=dtype).requires_grad_()
    angles = noise(1, TOKENS, 4, seed=1).repeat(1, 1, 2)
    mask = torch.full((TOKENS, TOKENS), float("-inf"), dtype=dtype).triu(1)[None, None]
    layer.config._attn_implementation = "eager"
    out, _ = layer(states, (angles.cos().to(dtype), angles.sin().to(dtype)), mask)
    trained = list(layer.parameters())
    return [out.detach(), *torch.autograd.grad(out, [states, *trained], noise(*out.shape, seed=2, dtype=dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_gives_what_the_stock_one_gives(family, dtype, monkeypatch):
    stock = LAYERS[family]().to(dtype)
    ours, kernel = copy.deepcopy(stock), []
    apply = rotation._Rotary.apply
    monkeypatch.setattr(rotation._Rotary, "apply", lambda *given: kernel.append(given) or apply(*given))
    take_over(nn.ModuleList([ours]))
    assert type(ours) is not type(stock) and type(ours).__name__ == type(stock).__name__
    found, expected = outcome(copy.deepcopy(ours), dtype), outcome(stock, dtype)
    assert len(kernel) == (dtype != torch.float64)
    close = rounding(dtype, 32, 8, TOKENS)
    if dtype == torch.bfloat16:
        assert torch.equal(found[0], expected[0])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close * float(other.abs().max()))


@pytest.mark.parametrize("family", OTHERS)
def test_other_kinds_are_left_alone(family):
    layer = OTHERS[family]().bfloat16()
    assert not has_plain_rotary(layer)
    before = type(layer)
    take_over(nn.ModuleList([layer]))
    assert type(layer) is before


@pytest.mark.parametrize(
    "change",
    [
        lambda query, key, angles: (query.repeat(2, 1, 1, 1), key.repeat(2, 1, 1, 1), angles),
        lambda query, key, angles: (query, key, angles.double()),
        lambda query, key, angles: (query[..., :4], key[..., :4], angles[..., :4]),
        lambda query, key, angles: (query.contiguous(), key, angles),
        lambda query, key, angles: (query, key, angles.requires_grad_()),
        lambda query, key, angles: (query[:0], key[:0], angles[:0]),
    ],
    ids=["two rows", "angles of another type", "a part of each head", "head after head", "learned angles", "nothing"],
)
def test_what_the_kernel_does_not_read_is_rotated_by_the_stock_function(change, monkeypatch):
    monkeypatch.setattr(rotation._Rotary, "apply", None)
    rows = noise(1, TOKENS, 6, 8).transpose(1, 2)
    query, key, angles = change(rows[:, :4], rows[:, 4:], noise(1, TOKENS, 8))
    stock = modeling_llama.apply_rotary_pos_emb
    found, expected = rotated(stock, query, key, angles, angles), stock(query, key, angles, angles)
    assert all(map(torch.equal, found, expected))


def test_heads_may_be_told_by_name():
    query, key = noise(1, 4, TOKENS, 8), noise(1, 2, TOKENS, 8)
    given = {"q": query, "k": key, "cos": noise(1, TOKENS, 8), "sin": noise(1, TOKENS, 8)}
    stock = modeling_llama.apply_rotary_pos_emb
    assert all(map(torch.equal, rotated(stock, **given), stock(**given)))


def test_rotated_heads_may_be_changed_where_they_are():
    rows, angles = noise(1, TOKENS, 6, 8), noise(1, TOKENS, 8)
    slopes = []
    for rotate in (partial(rotated, modeling_llama.apply_rotary_pos_emb), modeling_llama.apply_rotary_pos_emb):
        heads = rows.clone().requires_grad_()
        query, _ = rotate(*heads.transpose(1, 2).split([4, 2], 1), angles, angles)
        query *= 3
        slopes.append(torch.autograd.grad(query, heads, torch.ones_like(query))[0])
    torch.testing.assert_close(*slopes)


def test_a_forward_inside_something_that_is_no_function_is_left_alone():
    kind = behind_a_decorator(LlamaAttention)
    kind.forward.__wrapped__ = SimpleNamespace(__wrapped__=LlamaAttention.forward)
    assert not has_plain_rotary(kind(LlamaConfig(**SIZES), 0))


def test_a_layer_is_taken_over_once():
    layer = LAYERS["llama"]()
    take_over(nn.ModuleList([layer]))
    ours = type(layer)
    take_over(nn.ModuleList([layer]))
    assert type(layer) is ours and not has_plain_rotary(layer)
