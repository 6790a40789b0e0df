"""A packed tree gives the loss and the gradients of the plain padded batch, for every family that is supported.

The batch is computed by a model that is transformers' and PEFT's alone, with its own attention, so what is compared
holds the attention of packed rows, the chunked head, and the backward passes written by hand.
"""

import pytest
import torch

from families import FAMILIES, padded_step, twins
from rounding import backward_sums, longest, rounding
from stretto.algorithms.base import build
from stretto.kernels.cpu import tiles
from stretto.models.latent_attention import LatentAttention
from stretto.models.logprob_head import logprobs_of
from stretto.recipe.schema import AlgorithmSection
from stretto.training.packing import pack
from stretto.training.trainer import Trainer
from tiers import slow_but
from tiny import CPU, SETTINGS, Recorder, credited, distance, finished, keep_activations, random_groups, step

RLOO = build(AlgorithmSection(name="rloo"))
TEMPERATURE = 0.9

EXACT = 1e-10
"""Relative distance allowed in fp64, to which all that computes keeps."""

MODES = {
    "plain": {"adapter": False, "checkpointing": False},
    "checkpointing": {"adapter": False, "checkpointing": True},
    "lora": {"adapter": True, "checkpointing": False},
    "lora and checkpointing": {"adapter": True, "checkpointing": True},
}

BY_HAND = {
    "llama": {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"},
    "qwen2 with a window in one layer": {"Qwen2RMSNorm", "Qwen2MLP", "Qwen2Attention"},
    "qwen3 with wide heads": {"Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"},
    "mistral with a window": {"MistralRMSNorm", "MistralMLP", "MistralAttention"},
    "gemma": {"GemmaAttention"},
    "gemma3 with windows": {"Gemma3Attention"},
    "qwen3 with experts": {"Qwen3MoeRMSNorm", "Qwen3MoeAttention"},
    "deepseek v3 with narrow values": {"DeepseekV3RMSNorm", "DeepseekV3MLP"},
}
"""Layers that have a backward written by hand in fp32, but for adapters."""


def samples_of(seed):
    """Groups under one system prompt, with branching turns."""
    return credited(RLOO, random_groups(seed))


@pytest.mark.parametrize("seed", slow_but(1, of=[1, 2]))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_tree_is_the_padded_batch(family, mode, seed):
    policy, stock = twins(family, adapter=MODES[mode]["adapter"])
    samples = samples_of(seed)
    loss, expected = padded_step(stock, RLOO, samples, temperature=TEMPERATURE)
    packed = step(policy, RLOO, samples, temperature=TEMPERATURE, checkpointing=MODES[mode]["checkpointing"])
    assert packed.metrics["tokens/shared"] > 50
    assert packed.metrics["loss"] == pytest.approx(loss, rel=EXACT)
    assert distance(expected, packed.gradients) < EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_stretches_side_by_side_wherever_they_can_be_change_nothing(family, monkeypatch):
    monkeypatch.setattr(tiles, "PER_CALL", 0)
    policy, stock = twins(family)
    samples = samples_of(4)
    _, expected = padded_step(stock, RLOO, samples, temperature=TEMPERATURE)
    assert distance(expected, step(policy, RLOO, samples, temperature=TEMPERATURE).gradients) < EXACT


def said_by(policy, samples):
    """Log-probabilities of a row's trained tokens, still to be differentiated."""
    row = pack(samples, device=CPU, dtype=torch.float64)
    states = policy.hidden(row.tokens, row.positions, row.layout)
    return logprobs_of(states[row.sources], policy.head(), row.targets, temperature=TEMPERATURE)[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_rows_in_flight_do_not_mix(family, mode):
    """Both forwards come before either backward, which computes a row again where there is checkpointing."""
    policy, stock = twins(family, adapter=MODES[mode]["adapter"])
    samples = samples_of(5)
    half = len(samples) // 2
    _, expected = padded_step(stock, RLOO, samples, temperature=TEMPERATURE)
    settings = SETTINGS | {"checkpointing": MODES[mode]["checkpointing"]}
    trainer = Trainer(policy, RLOO, Recorder(), **settings)
    try:
        both = torch.cat([said_by(policy, samples[:half]), said_by(policy, samples[half:])])
        _, found = finished(both, policy.trained(), RLOO, samples)
    finally:
        trainer.close()
        keep_activations(policy.network)
    assert distance(expected, found) < EXACT


@pytest.mark.parametrize("seed", slow_but(1, of=[1, 2]))
@pytest.mark.parametrize("mode", ["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_single_precision_each_parameter_has_the_gradient_of_the_padded_batch(family, mode, seed):
    policy, stock = twins(family, adapter=MODES[mode]["adapter"], dtype=torch.float32)
    samples = samples_of(seed)
    _, expected = padded_step(stock, RLOO, samples, temperature=TEMPERATURE)
    close = rounding(torch.float32, *backward_sums(stock.config, longest(samples)))
    assert distance(expected, step(policy, RLOO, samples, temperature=TEMPERATURE).gradients) < close


@pytest.mark.parametrize("family", FAMILIES)
def test_backward_passes_written_by_hand_are_part_of_what_is_compared(family):
    policy, stock = twins(family, adapter=True, dtype=torch.float32)
    pairs = zip(policy.network.modules(), stock.modules(), strict=True)
    pairs = ((mine, theirs) for mine, theirs in pairs if not isinstance(mine, LatentAttention))  # as the family's there
    other = {type(theirs).__name__ for mine, theirs in pairs if type(mine) is not type(theirs)}
    assert other - {"Linear", "ParamWrapper"} == BY_HAND.get(family, set()), "what PEFT itself adapts layers with"
