"""An engine keeps latents where keys and values are made of them, and answers as one that keeps keys and values."""

import warnings

import numpy as np
import pytest
import torch

from families import FAMILIES, LORA, sharpen
from lanes import requests
from stretto.engines.native.cache import token_bytes
from stretto.engines.native.engine import NativeEngine
from stretto.models.latent_attention import LatentAttention, latent_of
from stretto.models.lora import active_pairs, add_adapter
from stretto.models.quantised import quantise
from tiny import CPU, policy_from

LAYERS, RANK, TURNED, BYTES = 2, 16, 4, 8


def policy_of(case, *, latents=True):
    """A model that makes its keys and values of latents; one that an engine sees nothing of that in, if told so."""
    policy = policy_from(FAMILIES["deepseek v3 with narrow values"]())
    if case == "int8":
        sharpen(policy.network)
        quantise(policy.network, "int8", CPU)
    if case != "full":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experts in few bits get no adapter
            policy.adapted = add_adapter(policy.network, LORA, seed=0)
    if case != "int8":
        sharpen(policy.network)
    for module in policy.network.modules() if not latents else ():
        if isinstance(module, LatentAttention):
            module.__class__ = type(module).__mro__[2]  # the family's own
    return policy


def answers(engine):
    """To requests of which some begin alike, in two groups, the second while the first is under way."""
    engine.submit(requests(1, 7))
    found = engine.step(0.0)
    rows = [(tuple(keys.shape[1::2]), tuple(values.shape[1::2])) for keys, values in map(engine.cache.of_layer, (0, 1))]
    kept = [sum(states.numel() for states in each.values()) for each in (engine.cache.keys, engine.cache.values)]
    engine.submit(requests(2, 4))
    while done := engine.step(60.0):
        found += done
    return sorted(found, key=lambda each: each.key), rows, kept


@pytest.mark.parametrize("case", ["full", "lora", "int8"])
def test_an_engine_that_keeps_latents_answers_as_one_that_keeps_keys_and_values(case):
    policy, plain = policy_of(case), policy_of(case, latents=False)
    assert (latent_of(policy.network), latent_of(plain.network)) == (RANK, 0)
    (mine, rows, kept), (theirs, others, whole) = answers(NativeEngine(policy)), answers(NativeEngine(plain))
    assert rows == [((1, RANK + TURNED), (1, RANK))] * LAYERS
    assert others == [((4, 12), (4, 6))] * LAYERS
    assert kept[1] == 0 < whole[1], "a value is a part of its key, and takes no memory of its own"
    assert len(mine) == 11
    for one, other in zip(mine, theirs, strict=True):
        assert (one.key, one.tokens.tolist(), one.stop) == (other.key, other.tokens.tolist(), other.stop)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-6)


def test_an_adapter_too_small_for_the_weights_type_is_not_lost():
    """Half a unit in the last place of the weight is larger than what the adapter adds to it."""
    policy = policy_of("lora")
    modules = policy.network.to(torch.bfloat16).modules()
    attention = next(module for module in modules if isinstance(module, LatentAttention))
    layer, chance = attention.kv_b_proj, torch.Generator().manual_seed(0)
    for weight, size in ((layer.base_layer.weight, 0.03), *((pair[0], 0.1) for pair in active_pairs(layer))):
        weight.data = (size * torch.randn(weight.shape, generator=chance)).to(torch.bfloat16)
    ((down, up, scale),) = active_pairs(layer)
    up.data = (1e-5 * torch.randn(up.shape, generator=chance)).to(torch.bfloat16)
    merged = layer.base_layer.weight + scale * up @ down
    assert (merged == layer.base_layer.weight).double().mean() > 0.9
    states = torch.randn(1, 4, 5, 8, generator=chance).to(torch.bfloat16)
    with_adapter = attention.asked_of_latents(states).double()
    layer.enable_adapters(False)
    brought = with_adapter - attention.asked_of_latents(states).double()
    keys = up.double().view(4, 8 + 6, -1)[:, :8]
    expected = scale * (states.double() @ keys @ down.double())
    assert (brought - expected).norm() < 0.02 * expected.norm()


def test_a_token_takes_the_memory_of_its_latent():
    assert token_bytes(policy_of("full")) == LAYERS * (RANK + TURNED) * BYTES
