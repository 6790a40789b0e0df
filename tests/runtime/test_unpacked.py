"""A whole run with a model that cannot be given packed rows: it is told, trains, resumes, and several cells agree."""

import asyncio
import warnings

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from crewed import alone, distance, together
from running import assert_same_run, metrics, recipe_in, resume, start
from stretto.cli.main import main
from stretto.models.scratch import character_tokenizer


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    """The folder of a tiny random Gemma 2."""
    folder = tmp_path_factory.mktemp("capped")
    tokenizer = character_tokenizer("01=")
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, sliding_window=8, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def model(folder, **keys):
    return {"model": {"name": folder, "adapter": None, **keys}}


@pytest.mark.filterwarnings("ignore:.*one by one")
def test_it_trains_and_resumes_like_any_other(capped, tmp_path):
    whole = start(tmp_path, evaluate__every=1, **model(capped, dtype="float32")).folder
    assert all(row["tokens/shared"] == 0 for row in metrics(whole)[1:])
    assert len({row["grad_norm"] for row in metrics(whole)[1:]}) > 1
    part = start(tmp_path, evaluate__every=1, run__steps=1, **model(capped, dtype="float32")).folder
    resume(part, changes=["run.steps=3"], allow=["run"])
    assert_same_run(part, whole, step=3)


@pytest.mark.filterwarnings("ignore:.*one by one")
@pytest.mark.parametrize("strategy", ["flatten", "elastic"])
def test_several_cells_make_the_weights_of_one(capped, strategy, tmp_path):
    recipe = recipe_in(tmp_path, optimizer__lr=1e-4, **model(capped, dtype="float64"))
    single, _ = asyncio.run(alone(recipe, tmp_path))
    weights, *_ = asyncio.run(together(recipe, tmp_path, strategy))
    assert distance(single, weights) < 1e-8


def test_the_command_line_says_so_in_a_line(capped, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe_in(tmp_path, run__steps=1, **model(capped, dtype="float32"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["train", "tiny.yaml"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "one by one" in line]
    assert len(told) == 1
    assert told[0].startswith("note: gemma2: ")
