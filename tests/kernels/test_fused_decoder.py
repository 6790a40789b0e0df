"""Decoders that are written out give what the networks themselves give, for all families that are of their kind."""

import pytest
import torch
from transformers import (
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    OlmoConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from alone import ROUNDING
from asked import sampled
from stretto.engines.native import decode_backend
from stretto.engines.native.decode_backend import Steps
from stretto.engines.native.layout import DecodeLayout
from stretto.kernels.cpu import fused_decoder as written
from stretto.kernels.cpu.fused_decoder import close, is_common
from stretto.kernels.cpu.packed_linear import PackedSteps
from stretto.models.attention import KEYWORD
from tiny import policy_from

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
COMMON = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama with biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2 with a window in one layer": lambda: Qwen2Config(
        **SIZES, sliding_window=5, use_sliding_window=True, max_window_layers=2
    ),
    "qwen3 with wide heads": lambda: Qwen3Config(**SIZES, head_dim=16),
    "mistral with a window": lambda: MistralConfig(**SIZES, sliding_window=5),
    "gemma, which scales its embeddings": lambda: GemmaConfig(**SIZES, head_dim=8),
}
OTHERS = {
    "granite, which adds less of each layer": lambda: GraniteConfig(**SIZES, residual_multiplier=0.5),
    "olmo, which may clip": lambda: OlmoConfig(**SIZES, clip_qkv=50.0),
    "ministral 3, which sharpens far positions": lambda: Ministral3Config(**SIZES, head_dim=8),
    "smollm3, some of whose layers do not turn": lambda: SmolLM3Config(**SIZES, pad_token_id=0),
    "qwen3 with experts": lambda: Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8
    ),
}


@pytest.mark.parametrize("compiled", [True, False], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("family", COMMON)
def test_families_of_the_common_kind_are_written_out_and_say_the_same(family, compiled, monkeypatch):
    policy = policy_from(COMMON[family](), dtype=torch.float32)
    monkeypatch.setattr(decode_backend, "decode_kernels", lambda dtype: None)
    looked = []
    plain = sampled(policy, Steps(policy))
    if compiled:
        monkeypatch.undo()
        look = DecodeLayout.look
        monkeypatch.setattr(DecodeLayout, "look", lambda *args, **how: looked.append(1) or look(*args, **how))
    steps = PackedSteps(policy)
    found = sampled(policy, steps)
    assert steps.written is not None and (steps.kernels is not None) is compiled
    assert len(looked) == (SIZES["num_hidden_layers"] if compiled else 0)  # in the step that is computed both ways
    for key, answer in plain.items():
        assert found[key].tokens.tolist() == answer.tokens.tolist()
        assert found[key].logprobs == pytest.approx(answer.logprobs, abs=ROUNDING)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_keep_their_own_layers(family):
    policy = policy_from(OTHERS[family](), dtype=torch.float32)
    steps = PackedSteps(policy)
    plain, packed = sampled(policy, Steps(policy)), sampled(policy, steps)
    assert steps.tried and steps.written is None
    for key, answer in plain.items():
        assert packed[key].tokens.tolist() == answer.tokens.tolist()


def test_a_family_that_only_looks_alike_is_found_out_by_its_first_step(monkeypatch):
    monkeypatch.setattr(written, "FAMILIES", {"granite"})
    policy = policy_from(OTHERS["granite, which adds less of each layer"](), dtype=torch.float32)
    steps = PackedSteps(policy)
    assert not steps.tried
    expected = sampled(policy, Steps(policy))
    found = sampled(policy, steps)
    assert steps.tried and steps.written is None
    assert {key: each.tokens.tolist() for key, each in found.items()} == {
        key: each.tokens.tolist() for key, each in expected.items()
    }


def test_a_layer_with_a_part_more_is_another_kind():
    policy = policy_from(COMMON["llama"](), dtype=torch.float32)
    linear = PackedSteps(policy).forwards
    policy.network.model.layers[1].mlp.more = torch.nn.Identity()
    assert not is_common(policy.network.model, linear)


@pytest.mark.parametrize(("dtype", "more"), [(torch.float32, 1e-2), (torch.bfloat16, 0.2)])
def test_states_are_close_that_differ_by_rounding_only(dtype, more):
    states = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert close(states * (1 + torch.finfo(dtype).eps), states)
    assert not close(states * (1 + more), states)


def test_the_network_is_asked_in_its_own_way_only_once():
    policy = policy_from(COMMON["llama"](), dtype=torch.float32)
    asked = []
    policy.network.get_decoder().register_forward_pre_hook(
        lambda module, args, keywords: asked.append(type(keywords[KEYWORD]).__name__), with_kwargs=True
    )
    sampled(policy, PackedSteps(policy))
    assert asked.count("LayoutProbe") == 1 and set(asked) == {"LayoutProbe", "PrefillLayout"}
