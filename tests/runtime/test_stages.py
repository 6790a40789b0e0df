"""Runs with a reward model and a critic: whose numbers end up where, and which models are refused."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

import stretto
from rounding import rounding
from running import END, lines, recipe_in, start, tensors
from stretto.checks.deep import deep_problems

QUALITY = [{"name": "accuracy", "kind": "numeric"}, {"name": "quality", "kind": "model", "weight": 0.25}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a reward model and a critic that have the tokenizer of the tiny recipe."""
    folder = tmp_path_factory.mktemp("made")
    model = start(folder, run__steps=1, evaluate__every=0).model
    for name, kind in (("judge", AutoModelForSequenceClassification), ("critic", AutoModelForTokenClassification)):
        network = kind.from_pretrained(model, num_labels=1, dtype=torch.float64)
        with torch.no_grad():
            network.score.weight.normal_(generator=torch.Generator().manual_seed(7))
        network.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def finished(made, tmp_path_factory):
    """A run that both of them took part in."""
    critic = {"name": str(made / "critic"), "optimizer": None}
    roles = {"reward_model": {"name": str(made / "judge")}, "critic": critic}
    folder = tmp_path_factory.mktemp("runs")
    return start(
        folder, model__dtype="float64", roles=roles, rewards=QUALITY, algorithm={"name": "ppo"}, evaluate__pass_k=2
    ).folder


def rows(folder):
    """Every trajectory of a run."""
    return [row for path in sorted((folder / "samples").glob("step-*")) for row in lines(path)]


@torch.no_grad()
def test_the_reward_is_what_transformers_says_of_each_conversation_alone(made, finished):
    judge = AutoModelForSequenceClassification.from_pretrained(made / "judge", dtype=torch.float64).eval()
    assert judge.config.pad_token_id == END, "the end of an answer is padding here, which is not read"
    for row in rows(finished):
        (talk,) = row["conversations"]
        quality = float(judge(input_ids=torch.tensor([talk["tokens"]])).logits)
        assert row["reward"]["parts"]["quality"] == pytest.approx(quality, abs=1e-10)
        right = row["reward"]["parts"]["accuracy"]
        assert row["reward"]["value"] == pytest.approx(right + 0.25 * quality, abs=1e-10)
        assert row["reward"]["outcome"] == right, "a score has no full marks, so it says nothing about accuracy"


def test_metrics_show_the_score_like_every_part_and_the_stages_their_seconds(finished):
    line = lines(finished / "metrics.jsonl")[-1]
    quality = np.mean([row["reward"]["parts"]["quality"] for row in rows(finished) if row["step"] == line["step"]])
    assert line["reward/part/quality"] == pytest.approx(quality)
    assert line["seconds/reward"] > 0
    assert line["seconds/value"] > 0


@torch.no_grad()
def test_the_critic_is_the_baseline_of_each_token(made, finished):
    critic = AutoModelForTokenClassification.from_pretrained(made / "critic", dtype=torch.float64).eval()
    expected, found = [], []
    for row in (row for row in rows(finished) if row["step"] == 1):
        (talk,) = row["conversations"]
        sampled = np.flatnonzero(talk["trained"])
        values = critic(input_ids=torch.tensor([talk["tokens"]])).logits.flatten().numpy()[sampled - 1]
        later = 0.0
        told = []
        for at in reversed(range(len(sampled))):
            gets, follows = (row["reward"]["value"], 0.0) if at == len(sampled) - 1 else (0.0, values[at + 1])
            later = gets + follows - values[at] + 0.95 * later
            told.append(later)
        expected += reversed(told)
        found += np.array(talk["advantages"])[sampled].tolist()
    close = rounding(torch.float32, *[1, 1, 1] * 5)  # of norms, which compute in fp32
    np.testing.assert_allclose(found, (expected - np.mean(expected)) / np.std(expected, ddof=1), rtol=close, atol=close)


def test_a_run_whose_answers_a_model_judged_is_asked_without_it(finished):
    (answer,) = stretto.sample(finished, "0=")
    assert answer.failure is None and answer.tokens


def test_a_checkpoint_holds_nothing_of_frozen_models(finished, tmp_path):
    plain = start(tmp_path, model__dtype="float64").folder
    names = [tensors(folder / "checkpoints" / "step-000003").keys() for folder in (finished, plain)]
    assert names[0] == names[1]


def problems_of(folder, **roles):
    changes = {"roles": roles, "rewards": QUALITY if "reward_model" in roles else QUALITY[:1]}
    changes["algorithm"] = {"name": "ppo" if "critic" in roles else "grpo"}
    return {problem.field: problem.reason for problem in deep_problems(recipe_in(folder, **changes), folder)}


def test_a_model_with_another_tokenizer_or_none_is_refused(made, tmp_path):
    assert problems_of(tmp_path, reward_model={"name": str(made / "judge")}) == {}
    assert problems_of(tmp_path, critic={"name": "scratch"}) == {}
    other = tmp_path / "other"
    other.mkdir()
    for path in (made / "judge").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    vocabulary = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(vocabulary.replace('"0": 5', '"0": 6').replace('"1": 6', '"1": 5'))
    (reason,) = problems_of(tmp_path, reward_model={"name": str(other)}).values()
    assert reason.startswith("2 of the 8 tokens of model.name have other ids in it, such as")
    (other / "tokenizer.json").write_text("{")
    assert problems_of(tmp_path, reward_model={"name": str(other)}).keys() == {"roles.reward_model.name"}


def test_a_model_with_too_few_embeddings_or_too_short_a_context_is_refused(made, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    for path in (made / "critic").iterdir():
        (small / path.name).write_bytes(path.read_bytes())
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    assert "embeddings for 7 tokens" in problems_of(tmp_path, critic={"name": str(small)})["roles.critic.name"]
    (small / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    assert "in a context of 8" in problems_of(tmp_path, critic={"name": str(small)})["task"]
