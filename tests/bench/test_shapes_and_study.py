"""Random weights of a known shape in the place of a model, and the published set-up that is measured without a peer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stretto.bench import ours, run, study
from stretto.bench.cases import STUDY, STUDY_SECONDS, answer_lengths, plain_shape
from stretto.bench.flops import answers_to
from stretto.bench.peer_generate import rollout as generate_rollout
from stretto.bench.prepare import prepare
from stretto.bench.random_model import configuration, random_policy
from stretto.bench.run import BenchRequest, measure
from stretto.cli.main import main
from stretto.errors import RecipeError
from stretto.planner.cost import families
from stretto.planner.cost.shapes import ModelShape
from tiny import CPU

TINY = ModelShape(
    name="qwen2-tiny", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, ffn=48, vocab=300, tied=True
)  # fmt: skip
SIDES = {
    "prepare": prepare,
    "stretto rollout": ours.rollout,
    "stretto study": study.step,
    "generate rollout": generate_rollout,
}


@pytest.fixture(autouse=True)
def tiny_family(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, TINY.name, TINY)


def here(job):
    """Does a job in this process."""
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    measured = SIDES[job.side](job)
    return replace(measured, memory=measured.memory or 1 << 40)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-3b", "qwen3-8b", "llama3.2-1b", "Qwen/Qwen2.5-3B-Instruct"])
def test_a_shape_becomes_a_model_of_that_size(name):
    shape = plain_shape(name)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        network = AutoModelForCausalLM.from_config(configuration(shape))
    matrices = sum(w.numel() for w in network.parameters() if w.dim() == 2)
    assert matrices == shape.params
    assert type(network).__name__.lower().startswith(shape.name[:5])


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3", "gemma3-1b", "opt-1.3b", "qwen2.5-4711b"])
def test_a_shape_that_is_not_made_is_refused_before_anything_starts(name):
    with pytest.raises(RecipeError) as error:
        measure(BenchRequest(bench="rollout", model="", shape=name), note=len, run=None)
    assert error.value.problems[0].field == "--shape"


def test_random_weights_depend_on_the_seed_alone_and_can_be_saved(tmp_path):
    before = torch.random.get_rng_state()
    one, same, other = (random_policy(TINY.name, dtype=torch.float32, device=CPU, seed=s) for s in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [policy.network.get_input_embeddings().weight for policy in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    one.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == TINY.vocab


@pytest.mark.slow
def test_a_rollout_of_random_weights_does_equal_work_on_both_sides():
    wish = BenchRequest(
        bench="rollout", model="", shape=TINY.name, cases=("prompt-43-fp32",), prompts=2, samples=2, threads=1
    )
    (row,) = measure(wish, note=len, run=here)["rows"]
    assert row["model"] == TINY.name
    assert row["tokens_generated"]["stretto"] == row["tokens_generated"]["peer"]


def test_the_study_is_measured_beside_its_published_seconds(monkeypatch):
    small = [replace(case, dtype="float32", answer=6, prompt=40) for case in STUDY]
    monkeypatch.setitem(run.BENCHES, "study", replace(run.BENCHES["study"], cases=tuple(small)))
    wish = BenchRequest(bench="study", model="", shape=TINY.name, cases=("all",), prompts=3, threads=1)
    stored, online = measure(wish, note=len, run=here)["rows"]
    for row in (stored, online):
        assert row["peer"] == STUDY_SECONDS and "published" in row["peer_name"]
        assert row["ratio"] == pytest.approx(STUDY_SECONDS / row["stretto"])
        assert (row["optimizer"], row["samples"]) == ("adamw8bit", 1)
        assert row["tokens_trained"]["stretto"] == 3 * 6
        assert row["share_of_matmul_rate"].keys() == {"stretto"}, "other hardware has another rate"
    assert (stored["reference_answers"], online["reference_answers"]) == (0, 5)
    assert online["flops"]["unshared"] > online["flops"]["shared"] > stored["flops"]["shared"]


def test_every_answer_of_the_study_is_as_long_as_it_may_be():
    assert {int(tokens) for case in STUDY for tokens in answer_lengths(case).ravel()} == {256}
    assert answer_lengths(STUDY[0]).shape == (16, 1)


def test_the_references_answers_share_their_prompts():
    passes = answers_to([10, 20], 3, 4)
    assert passes["unshared"].tokens == 3 * (10 + 20 + 2 * 3)
    assert passes["shared"].tokens == 10 + 20 + 2 * 3 * 3
    assert passes["shared"].logits == passes["unshared"].logits == 2 * 3 * 4


def test_one_answer_per_prompt_cannot_be_compared():
    with pytest.raises(RecipeError) as error:
        measure(BenchRequest(bench="step", model="scratch", samples=1), note=len, run=None)
    assert error.value.problems[0].field == "--samples"


@pytest.mark.slow
def test_the_command_takes_a_shape(monkeypatch, capsys):
    monkeypatch.setattr(run, "measure", lambda wish, note: measure(wish, note=note, run=here))
    command = ["bench", "rollout", "--shape", TINY.name, "--prompts", "1", "--samples", "2", "--threads", "1"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["model"] == TINY.name
