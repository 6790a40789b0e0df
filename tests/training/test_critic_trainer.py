"""A critic's gradient is the one plain torch computes, in every layout, whatever of it is trained."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from stretto.algorithms.base import build
from stretto.algorithms.critic import clipped_value_loss
from stretto.models.load import load
from stretto.models.scalar_head import base_network
from stretto.models.source import locate
from stretto.models.value_model import load_value_model
from stretto.recipe.schema import Adapter, AlgorithmSection, Gae
from stretto.training.critic_trainer import CriticTrainer
from tiny import (
    CPU,
    SCRATCH_FILES,
    SETTINGS,
    VOCABULARY,
    Recorder,
    credited,
    distance,
    naive_rows,
    random_groups,
    scratch_model,
    speaking,
)

LORA = Adapter(rank=2, alpha=4.0)
PPO = build(AlgorithmSection(name="ppo"))


def critic(files=SCRATCH_FILES, *, adapter=None, shared=None, dtype=torch.float64):
    """A critic on the tiny model's base, or one in a folder; its head says something."""
    base = base_network(scratch_model(), SCRATCH_FILES, seed=3, device=CPU, base=None)
    model = load_value_model(files, base=base, adapter=adapter, shared=shared, dtype=dtype, device=CPU, seed=3)
    return speaking(model)


def trained(model, *pieces, gae=None, **settings):
    """Gradients and metrics of one step of a critic."""
    recorder = Recorder()
    trainer = CriticTrainer(model, PPO, recorder, gae=gae, **(SETTINGS | settings))
    for piece in pieces:
        trainer.accumulate(piece)
    report = trainer.apply()
    trainer.close()
    return recorder.gradients, report.metrics


def by_hand(model, samples, clip=0.2):
    """The mean over all tokens of the clipped loss, one forward per conversation through transformers alone."""
    ours = model.network.config._attn_implementation
    model.network.set_attn_implementation("sdpa")
    values = []
    for sample in samples:
        talk = sample.conversation
        states = model.network.get_decoder()(input_ids=torch.as_tensor(talk.tokens)[None], use_cache=False)
        at = torch.as_tensor(np.flatnonzero(talk.trained)) - 1
        values.append(model.scalar(states.last_hidden_state[0][at])[:, 0])
    model.network.set_attn_implementation(ours)
    loss = clipped_value_loss(torch.cat(values), naive_rows(samples, torch.float64), clip=clip).mean()
    names = model.trained()
    return float(loss.detach()), dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


@pytest.mark.parametrize("adapter", [None, LORA], ids=["all weights", "an adapter"])
@pytest.mark.parametrize("budget", [10_000, 40])
def test_the_gradient_is_that_of_one_plain_forward_per_conversation(adapter, budget):
    model, samples = critic(adapter=adapter), credited(PPO, random_groups(5))
    assert all(sample.values is not None and sample.returns is not None for sample in samples)
    loss, expected = by_hand(model, samples)
    found, metrics = trained(model, samples[::2], samples[1::2], token_budget=budget)
    assert distance(expected, found) < 1e-10
    assert metrics["critic/loss"] == pytest.approx(loss, rel=1e-12)
    returns = np.concatenate([sample.returns for sample in samples])
    missed = returns - np.concatenate([sample.values for sample in samples])
    assert metrics["critic/explained"] == pytest.approx(1 - missed.var() / returns.var())
    assert metrics["critic/return"] == pytest.approx(returns.mean())
    assert metrics["critic/tokens"] == len(returns)


def test_the_clip_range_is_the_recipes():
    model, samples = critic(), credited(PPO, random_groups(6))
    found, _ = trained(model, samples, gae=Gae(value_clip=0.01))
    assert distance(by_hand(model, samples, clip=0.2)[1], found) < 1e-10, "what the algorithm says comes first"
    own = CriticTrainer(model, replace(PPO, critic=()), None, gae=Gae(value_clip=0.01), **SETTINGS)
    own.accumulate(samples)
    assert own.meter.objective() == pytest.approx(by_hand(model, samples, clip=0.01)[0])
    own.close()


def test_an_adapter_on_the_base_of_the_policys_adapter_has_the_same_tensors():
    policy = load(scratch_model(adapter=LORA), SCRATCH_FILES, seed=3, device=CPU)
    policy_own = {id(weight) for weight in policy.network.parameters() if not weight.requires_grad}
    model, alone = critic(adapter=LORA, shared=policy), critic(adapter=LORA)
    frozen = [weight for weight in model.parameters().values() if not weight.requires_grad]
    assert frozen and all(id(weight) in policy_own for weight in frozen)
    assert not policy_own & {id(weight) for weight in alone.parameters().values()}
    samples = credited(PPO, random_groups(7))
    one, other = (trained(each, samples)[0] for each in (model, alone))
    assert all("lora_" in name or name.startswith("head") for name in one)
    assert distance(one, other) < 1e-12


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_base_in_few_bits_is_shared_too(kind):
    section = scratch_model(adapter=LORA, quantize=kind)
    policy = load(section, SCRATCH_FILES, seed=3, device=CPU)
    base = base_network(section, SCRATCH_FILES, seed=3, device=CPU, base=None, as_stored=True)
    dtype = policy.dtype
    model = load_value_model(SCRATCH_FILES, base=base, adapter=LORA, shared=policy, dtype=dtype, device=CPU, seed=3)
    theirs = {id(weight) for weight in policy.network.parameters() if not weight.requires_grad}
    frozen = {name: weight for name, weight in model.parameters().items() if not weight.requires_grad}
    assert any(weight.dtype == torch.uint8 for weight in frozen.values())
    assert all(id(weight) in theirs for weight in frozen.values())
    gradients, _ = trained(model, credited(PPO, random_groups(7)))
    assert all("lora_" in name or name.startswith("head") for name in gradients)


def test_a_critic_begins_by_saying_nothing():
    base = base_network(scratch_model(), SCRATCH_FILES, seed=3, device=CPU, base=None)
    model = load_value_model(
        SCRATCH_FILES, base=base, adapter=None, shared=None, dtype=torch.float32, device=CPU, seed=3
    )
    talks = [sample.conversation for sample in credited(PPO, random_groups(8))]
    trainer = CriticTrainer(model, PPO, None, gae=None, **SETTINGS)
    assert all(not values.any() for values in trainer.score(talks))
    trainer.close()


@pytest.mark.parametrize("kind", [AutoModelForSequenceClassification, AutoModelForCausalLM])
def test_a_reward_model_and_a_language_model_can_become_critics(kind, tmp_path):
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_labels=1, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        network = kind.from_config(config).double()
    network.save_pretrained(tmp_path)
    load = partial(load_value_model, adapter=None, shared=None, dtype=torch.float64, device=CPU, seed=3)
    model = load(locate(str(tmp_path), Path()), base=lambda: None)
    headed = kind is AutoModelForSequenceClassification
    assert bool(model.scalar.weight.any()) == headed, "a reward model's head is kept, and a language model gets one"
    if headed:
        assert torch.equal(model.scalar.weight, network.score.weight)
    samples = credited(PPO, random_groups(9))
    loss, _ = by_hand(model, samples)
    assert trained(model, samples)[1]["critic/loss"] == pytest.approx(loss, rel=1e-10)
