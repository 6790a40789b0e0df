"""Pairs in packed rows: never separated, and with the gradient of transformers' own classifier on each answer alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from stretto.algorithms.base import build
from stretto.models.reward_policy import load_reward_policy
from stretto.recipe.schema import PairwiseRanking
from stretto.training.packing import divide, merge
from stretto.training.rows import halved
from tiny import CPU, SCRATCH_FILES, VOCABULARY, distance, finished, sample, scratch_model, step

CENTERED = PairwiseRanking(centring=0.1)


def pairs(seed=0, count=6):
    """Random pairs with a question in common, and often more."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        common = rng.integers(1, VOCABULARY, rng.integers(2, 40)).tolist()
        for place in range(2):
            tokens = [*common, *rng.integers(1, VOCABULARY, rng.integers(1, 20)).tolist()]
            one = sample(tokens, [len(tokens) - 1], advantage=0.1 * index, name=f"p{index}")
            made.append(replace(one, key=(f"p{index}", 0, 0, place), leads=place == 0, siblings=2))
    return made


def reward_policy(seed=0, **sizes):
    """A random reward model whose scores differ."""
    policy = load_reward_policy(scratch_model(**sizes), SCRATCH_FILES, seed=seed, device=CPU)
    with torch.no_grad():
        for name, weight in policy.network.named_parameters():
            if weight.dim() == 2 and "lora_" not in name:
                weight.mul_(8)
        policy.scalar.weight.normal_(generator=torch.Generator().manual_seed(1))
    return policy


@pytest.mark.parametrize("budget", [1, 30, 60, 100, 10_000])
@pytest.mark.parametrize("share", [True, False])
def test_a_pair_is_never_cut(budget, share):
    samples = pairs()
    rows = divide(samples, budget, share=share, whole=True)
    assert [each.key for row in rows for each in row] == [each.key for each in samples]
    assert all(row[0].leads and len(row) % 2 == 0 for row in rows)
    for row in rows:
        assert len(row) == 2 or len(merge([each.conversation.tokens for each in row]).tokens) <= budget or not share


def test_a_row_of_pairs_is_halved_between_pairs_and_one_pair_not_at_all():
    samples = pairs(count=3)
    (first, second), _ = halved(samples, whole=True)
    assert [len(first), len(second)] in ([2, 4], [4, 2])
    assert halved(samples[:2], whole=True) is None


def alone(policy, samples):
    """Scores of conversations by the classifier's own forward, one after the other."""
    ours = policy.network.config._attn_implementation
    policy.network.set_attn_implementation("sdpa")
    try:
        states = [
            policy.network.get_decoder()(input_ids=torch.as_tensor(each.conversation.tokens)[None]).last_hidden_state[0]
            for each in samples
        ]
    finally:
        policy.network.set_attn_implementation(ours)
    places = [policy.reads(each.conversation)[0] for each in samples]
    return torch.cat([policy.scalar(state[place]) for state, place in zip(states, places, strict=True)])


@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "rank": 2, "alpha": 4.0}], ids=["full", "lora"])
def test_the_gradient_of_packed_pairs_is_that_of_each_answer_alone(adapter):
    policy, samples = reward_policy(adapter=adapter), pairs()
    loss, gradients = finished(alone(policy, samples), policy.trained(), build(CENTERED), samples)
    for budget in (1, 70, 10_000):
        found = step(policy, build(CENTERED), samples, token_budget=budget)
        assert found.metrics["loss"] == pytest.approx(loss, rel=1e-12)
        assert distance(found.gradients, gradients) < 1e-9
    assert "score.weight" in gradients and len(gradients) > 2


@torch.no_grad()
@pytest.mark.parametrize(
    ("adapter", "quantize"),
    [(None, "none"), ({"kind": "lora", "rank": 2, "alpha": 4.0}, "none"), ({"kind": "lora", "rank": 2}, "int8")],
    ids=["full", "lora", "lora on int8"],
)
def test_what_is_saved_is_a_classifier_that_transformers_reads_alike(adapter, quantize, tmp_path):
    policy = reward_policy(adapter=adapter, quantize=quantize)
    for name, weight in policy.trained().items():
        if "lora_" in name:  # a fresh adapter adds nothing
            weight.normal_(generator=torch.Generator().manual_seed(len(name)))
    policy.save(tmp_path)
    samples = pairs()
    network = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64)
    assert network.config.num_labels == 1
    padded = torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(each.conversation.tokens) for each in samples],
        batch_first=True,
        padding_value=network.config.pad_token_id,
    )
    mask = torch.arange(padded.shape[1])[None] < torch.tensor([[len(s.conversation.tokens)] for s in samples])
    scores = network(input_ids=padded, attention_mask=mask.long()).logits.flatten()
    found = step_scores(policy, samples)
    # Norms of transformers compute in fp32, whatever the dtype, and an adapter is merged in fp32.
    np.testing.assert_allclose(found, scores.numpy(), rtol=1e-5 if adapter is None else 1e-4)
    assert np.ptp(found) > 0.1


def step_scores(policy, samples):
    """What the trainer's forward says of conversations."""
    from stretto.training.trainer import Trainer
    from tiny import SETTINGS, Recorder

    trainer = Trainer(policy, build(CENTERED), Recorder(), **SETTINGS)
    try:
        return np.concatenate(trainer.score([each.conversation for each in samples]))
    finally:
        trainer.close()
