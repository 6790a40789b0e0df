"""Reward models and critics over packed rows: the numbers that transformers gives for each conversation alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
)

from stretto.errors import RecipeError, TrainingError
from stretto.models.memory import OutOfMemory
from stretto.models.scalar_head import FrozenScorer, base_network, load_scorer
from stretto.models.source import locate
from tiny import CPU, SCRATCH_FILES, VOCABULARY, random_groups, scratch_model

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": None,
    "eos_token_id": 0,
}
CLASSIFIERS = {"reward": AutoModelForSequenceClassification, "value": AutoModelForTokenClassification}


@pytest.fixture(scope="module")
def talks():
    """Conversations of several groups, with much in common, some of them of several turns."""
    groups = random_groups(4)
    return [talk for group in groups for each in group.trajectories for talk in each.conversations]


def saved(folder, role, config=None, *, labels=1, padding=0):
    """A random classifier in a folder, and what transformers makes of it."""
    config = config or LlamaConfig(**SIZES)
    config.num_labels, config.pad_token_id = labels, padding
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = CLASSIFIERS[role].from_config(config).double().eval()
    with torch.no_grad():
        network.score.weight.normal_(generator=torch.Generator().manual_seed(2))
    network.save_pretrained(folder)
    return network


def loaded(folder, role, *, budget=4096, dtype=torch.float64):
    files = SCRATCH_FILES if folder is None else locate(str(folder), Path())
    base = base_network(scratch_model(), SCRATCH_FILES, seed=3, device=CPU, base=None)
    return load_scorer(role, files, base=base, dtype=dtype, device=CPU, seed=3, token_budget=budget)


@torch.no_grad()
def alone(network, talk):
    """What transformers says of one conversation by itself."""
    return network(input_ids=torch.as_tensor(talk.tokens)[None]).logits.flatten().numpy()


@pytest.mark.parametrize("padding", [None, 0], ids=["nothing is padding", "the end of a turn is padding"])
@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Gemma3TextConfig])
def test_a_reward_model_gives_what_transformers_gives_each_conversation_alone(config, padding, talks, tmp_path):
    network = saved(tmp_path, "reward", config(**SIZES), padding=padding)
    found = loaded(tmp_path, "reward").score(talks)
    assert np.ptp(found) > 0.01
    for talk, number in zip(talks, found, strict=True):
        np.testing.assert_allclose(number, alone(network, talk), rtol=0, atol=1e-10)


def test_a_critic_gives_its_value_before_each_sampled_token(talks, tmp_path):
    network = saved(tmp_path, "value")
    for talk, values in zip(talks, loaded(tmp_path, "value").score(talks), strict=True):
        expected = alone(network, talk)[np.flatnonzero(talk.trained) - 1]
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("role", CLASSIFIERS)
def test_rows_of_any_size_give_the_same_numbers(role, talks):
    whole, small = loaded(None, role).score(talks), loaded(None, role, budget=30).score(talks[::-1])[::-1]
    for one, other in zip(whole, small, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def test_a_head_of_noise_is_the_same_in_every_process_and_no_weight_can_be_trained(talks):
    one, other = loaded(None, "value"), loaded(None, "value")
    assert torch.equal(one.head.weight, other.head.weight)
    assert not any(weight.requires_grad for weight in (*one.network.parameters(), one.head.weight))


def test_what_does_not_fit_into_memory_is_tried_in_smaller_rows(talks):
    class Small(FrozenScorer):
        def numbers(self, row):
            if len(row) > self.most:
                raise OutOfMemory
            return super().numbers(row)

    plenty = loaded(None, "reward")
    small = Small(plenty.network, plenty.head, plenty.reads, token_budget=4096)
    small.most = 2
    for one, other in zip(plenty.score(talks), small.score(talks), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)
    small.most = 0
    with pytest.raises(TrainingError, match="too little memory to score a single conversation"):
        small.score(talks)


def test_models_that_are_no_classifier_of_one_label_are_refused(tmp_path):
    saved(tmp_path / "two", "reward", labels=2)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_labels=1)).save_pretrained(tmp_path / "causal")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"model_type": "llama"}')
    for name, role, reason in (
        ("two", "reward", "one linear layer of one label"),
        ("causal", "value", "has no head of one number"),
        ("torn", "reward", "could not be loaded"),
    ):
        with pytest.raises(RecipeError, match=reason) as error:
            loaded(tmp_path / name, role)
        field = {"reward": "roles.reward_model.name", "value": "roles.critic.name"}[role]
        assert [problem.field for problem in error.value.problems] == [field]
