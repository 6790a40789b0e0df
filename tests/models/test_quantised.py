"""LoRA on a base of four bits: a packed tree is the padded batch there too, and sampling leaves the base as it was.

Nothing of ours knows what the layers of the base are. bitsandbytes repacks them in place if a model in eval mode is
asked, and gradients are wrong from then on, which is why a policy is never in that mode. It knows no fp64 either, so
bounds here are those of fp32; that a packed tree is exact is tested in `test_padded_batch`.
"""

import copy

import bitsandbytes
import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from alone import ROUNDING, alone, drained
from families import LORA, SIZES, adapt, padded_step, sharpen
from rounding import backward_sums, longest, rounding
from stretto.algorithms.base import build
from stretto.engines.base import Request
from stretto.engines.native.engine import NativeEngine
from stretto.models.lora import add_adapter
from stretto.recipe.schema import AlgorithmSection
from tiny import credited, distance, policy_around, random_groups, step

RLOO = build(AlgorithmSection(name="rloo"))
WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 128}
"""A block of NF4 has 64 weights."""


def in_four_bits(network):
    """The network with NF4 in place of every linear layer but the head."""
    for parent in list(network.model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                small = bitsandbytes.nn.Linear4bit(
                    layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                )
                small.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
                setattr(parent, name, small.to("cpu"))
    return network.requires_grad_(False).train()


@pytest.fixture(params=[LlamaConfig, Qwen3Config])
def pair(request):
    """A policy, and the same weights in a model that is transformers', PEFT's and bitsandbytes' alone."""
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(request.param(**WIDE))
    sharpen(stock)
    policy = policy_around(in_four_bits(copy.deepcopy(stock)))
    in_four_bits(stock)
    policy.adapted = add_adapter(policy.network, LORA, seed=0)
    adapt(stock)
    theirs = dict(stock.named_parameters())
    for name, weight in policy.network.named_parameters():
        if "lora_" in name:
            theirs[name].data.copy_(nn.init.normal_(weight.data, std=0.3))
    return policy, stock


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_packed_tree_on_four_bits_is_the_padded_batch_before_and_after_sampling(pair, seed, checkpointing):
    policy, stock = pair
    samples = credited(RLOO, random_groups(seed))
    loss, expected = padded_step(stock, RLOO, samples, temperature=0.9)
    packed = step(policy, RLOO, samples, temperature=0.9, checkpointing=checkpointing)
    assert packed.metrics["tokens/shared"] > 50
    close = rounding(torch.float32, *backward_sums(stock.config, longest(samples)))
    assert packed.metrics["loss"] == pytest.approx(loss, rel=close)
    assert distance(expected, packed.gradients) < close
    requests = [
        Request(key=key, tokens=np.arange(5, 12), max_new_tokens=6, stop=frozenset(), temperature=1.0) for key in (1, 2)
    ]
    engine = NativeEngine(policy)
    engine.submit(requests)
    done = drained(engine)
    for request in requests:
        answer, logprobs, _ = alone(stock, request)
        assert done[request.key].tokens.tolist() == answer
        np.testing.assert_allclose(done[request.key].logprobs, logprobs, rtol=0, atol=ROUNDING)
    for layer in policy.network.modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            assert layer.training
            assert not getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
    again = step(policy, RLOO, samples, temperature=0.9, checkpointing=checkpointing)
    assert distance(packed.gradients, again.gradients) == 0
