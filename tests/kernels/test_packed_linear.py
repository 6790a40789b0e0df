"""Ordered weights give what plain ones give, and never those of before an update."""

import numpy as np
import pytest
import torch
from peft.tuners.lora import Linear as Adapted
from transformers import Qwen2Config

from asked import requests, sampled
from rounding import forward_sums, rounding
from stretto.engines.native.decode_backend import Steps
from stretto.engines.native.engine import NativeEngine
from stretto.errors import EngineError
from stretto.kernels.cpu.fused_decoder import is_common
from stretto.kernels.cpu.packed_linear import PackedSteps, memory_of, packs
from stretto.models.lora import add_adapter
from stretto.recipe.schema import Adapter
from tiny import policy_from, scratch_policy

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def whole(dtype):
    """A policy that is trained as a whole."""
    return scratch_policy(dtype=dtype, width=32)


def with_adapter(dtype):
    """A policy whose adapter says something."""
    return stir(scratch_policy(dtype=dtype, width=32, adapter=Adapter(rank=4, alpha=8)))


def close(policy):
    """The rounding of log-probabilities, which are about -1. Products of short numbers add in fp32 and round once."""
    sums = forward_sums(policy.network.config, tokens=20)
    narrow = policy.dtype == torch.bfloat16
    return rounding(policy.dtype, *([1 for _ in sums] if narrow else sums))


def stir(policy):
    """Gives the second halves of its adapters something to say."""
    with torch.no_grad():
        for name, weight in policy.network.named_parameters():
            if "lora_B" in name:
                weight.normal_(generator=torch.Generator().manual_seed(len(name)))
    return policy


@pytest.mark.parametrize("make", [whole, with_adapter])
def test_the_same_tokens_and_log_probabilities_come_out(make):
    policy = make("float32")
    plain, packed = sampled(policy, Steps(policy)), sampled(policy, PackedSteps(policy))
    for key, answer in plain.items():
        assert packed[key].tokens.tolist() == answer.tokens.tolist()
        assert packed[key].logprobs == pytest.approx(answer.logprobs, abs=close(policy))


@pytest.mark.parametrize("dtype", [name for name in ("bfloat16", "float32") if packs(whole(name))])
@pytest.mark.parametrize("make", [whole, with_adapter])
def test_in_short_numbers_they_differ_by_rounding(make, dtype):
    """As far as the tokens are the same: a near tie may go either way, and contexts differ from there on."""
    policy = make(dtype)
    plain, packed = sampled(policy, Steps(policy)), sampled(policy, PackedSteps(policy))
    compared = 0
    for key, answer in plain.items():
        different = np.flatnonzero(packed[key].tokens != answer.tokens)
        alike = int(different[0]) if len(different) else len(answer.tokens)
        assert packed[key].logprobs[:alike] == pytest.approx(answer.logprobs[:alike], abs=close(policy))
        compared += alike
    assert compared > sum(len(answer.tokens) for answer in plain.values()) // 4


def test_an_update_is_seen_whoever_makes_it():
    policy = scratch_policy(dtype="float32", width=32)
    steps = PackedSteps(policy)
    before = sampled(policy, steps)
    with torch.no_grad():
        for weight in policy.network.parameters():
            weight.mul_(-1.5)
    after, fresh = sampled(policy, steps), sampled(policy, Steps(policy))
    assert {key: each.tokens.tolist() for key, each in after.items()} == {
        key: each.tokens.tolist() for key, each in fresh.items()
    }
    assert any(before[key].tokens.tolist() != each.tokens.tolist() for key, each in after.items())


def test_what_was_changed_behind_the_back_of_the_counter_is_read_anew_after_a_publish():
    policy = scratch_policy(dtype="float32", width=32)
    steps = PackedSteps(policy)
    sampled(policy, steps)
    for weight in policy.network.parameters():
        weight.data.mul_(-1.5)
    steps.weights_changed()
    after, fresh = sampled(policy, steps), sampled(policy, Steps(policy))
    assert {key: each.tokens.tolist() for key, each in after.items()} == {
        key: each.tokens.tolist() for key, each in fresh.items()
    }


def test_layers_compute_as_ever_for_whoever_trains_them():
    policy = scratch_policy(dtype="float32", width=32)
    sampled(policy, PackedSteps(policy))
    assert all("forward" not in module.__dict__ for module in policy.network.modules())


def test_only_what_gains_is_packed():
    assert packs(scratch_policy(dtype="bfloat16", width=32)) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert packs(scratch_policy(dtype="float32", width=32))
    assert not packs(scratch_policy(dtype="float64"))


def test_sleep_gives_the_copies_back():
    policy = with_adapter("float32")
    steps = PackedSteps(policy)
    engine = NativeEngine(policy, steps=steps)
    engine.submit(requests(2))
    while engine.step(60.0):
        pass
    assert steps.ordered
    engine.sleep(keep=True)
    assert not steps.ordered and not steps.ready


@pytest.mark.parametrize(("make", "kept"), [(whole, False), (with_adapter, True)])
def test_what_the_next_update_changes_is_not_kept_when_nothing_is_left_to_decode(make, kept):
    steps = PackedSteps(make("float32"))
    sampled(steps.policy, steps)
    assert bool(steps.ordered) == kept
    assert not any(copy.trained for copy in steps.ordered.values())
    assert not steps.cache.keys and not steps.prefixes.keys


def test_an_adapter_that_is_switched_off_is_off():
    policy = with_adapter("float32")
    steps, plain = PackedSteps(policy), Steps(policy)
    on = sampled(policy, steps)
    with policy.without_adapter():
        off, expected = sampled(policy, steps), sampled(policy, plain)
    assert {k: a.tokens.tolist() for k, a in off.items()} == {k: a.tokens.tolist() for k, a in expected.items()}
    assert {k: a.tokens.tolist() for k, a in off.items()} != {k: a.tokens.tolist() for k, a in on.items()}


def test_adapted_layers_are_among_those_that_are_packed():
    steps = PackedSteps(with_adapter("float32"))
    assert sum(isinstance(module, Adapted) for module in steps.forwards) == 14


def test_layers_of_the_same_states_are_one_product_each():
    """Queries, keys and values of a layer; both halves of its feed-forward; nothing else."""
    policy = with_adapter("float32")
    engine = NativeEngine(policy, steps=PackedSteps(policy))
    engine.submit(requests(2))
    engine.step(0.0)
    assert engine.steps.written is not None
    assert len(engine.steps.ready) == 4 * 2


def test_layers_of_which_some_have_biases_are_not_one_product():
    config = Qwen2Config(vocab_size=40, num_key_value_heads=2, **SIZES)
    policy = policy_from(config, dtype=torch.float32)
    assert is_common(policy.network.model, PackedSteps(policy).forwards)
    policy.network.model.layers[1].self_attn.k_proj.bias = None
    assert not is_common(policy.network.model, PackedSteps(policy).forwards)


def test_adapters_of_some_layers_with_biases_reach_those_layers_only():
    config = Qwen2Config(vocab_size=40, num_key_value_heads=2, initializer_range=0.3, **SIZES)
    policy = policy_from(config, dtype=torch.float32)
    policy.adapted = add_adapter(
        policy.network, Adapter(rank=3, alpha=5, targets=("q_proj", "v_proj", "up_proj")), seed=0
    )
    stir(policy)
    plain, packed = sampled(policy, Steps(policy)), sampled(policy, PackedSteps(policy))
    for key, answer in plain.items():
        assert packed[key].tokens.tolist() == answer.tokens.tolist()
        assert packed[key].logprobs == pytest.approx(answer.logprobs, abs=close(policy))


@pytest.mark.parametrize(("make", "trained"), [(whole, True), (with_adapter, True), (with_adapter, False)])
def test_a_copy_that_is_not_its_weight_any_more_is_told(make, trained):
    engine = NativeEngine(make("float32"))
    weights = dict(engine.policy.network.named_parameters())
    sound = engine.checksums(weights)
    engine.submit(requests(4))
    engine.step(0.0)
    assert engine.checksums(weights) == sound
    copies = [each for each in engine.steps.ordered.values() if each.trained == trained]
    memory_of(copies[0].weight)[0] ^= 1
    spoiled = {name for name, weight in weights.items() if any(weight is each for each in copies[0].made_of)}
    told = engine.checksums(weights)
    assert spoiled
    assert {name for name in weights if told[name] != sound[name]} == spoiled
    assert engine.checksums([]).keys() == spoiled, "also if nobody asks"
    if trained:
        with pytest.raises(EngineError, match="not the weights any more"):
            engine.abort([request.key for request in requests(4)])
