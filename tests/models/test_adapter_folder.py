"""An adapter's folder as `model.name`: gone on with where it is plain LoRA, and told what it is where it is not."""

import json
import shutil

import pytest
import torch
import yaml

from exported import ADAPTER, LEARNS, edited, lora_run, trained
from running import data_with, recipe_in, start
from stretto.api.recipes import PROBES
from stretto.checks.recipe import examine
from stretto.errors import RecipeError
from stretto.models.load import load
from stretto.models.source import locate
from stretto.runtime import base_copy
from tiny import CPU

SAVED = "checkpoints/step-000002"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that trained an adapter."""
    return lora_run(tmp_path_factory.mktemp("first"))


def going_on(folder, name, **changes):
    """The recipe's section of a model that goes on with an adapter, and its files."""
    recipe = recipe_in(folder, model__name=str(name), model__scratch=None, model__adapter=ADAPTER, **changes)
    return recipe, locate(recipe.model.name, folder)


def test_training_goes_on_with_the_adapter_as_it_was_saved(run, tmp_path):
    recipe, files = going_on(tmp_path, run / SAVED)
    assert files.folder == run / "base" and files.adapter.rank == 4
    loaded = load(recipe.model, files, seed=99, device=CPU).trained()
    saved = trained(run).load("float32").network.named_parameters()
    for name, weight in saved:
        if name in loaded:
            assert torch.equal(weight, loaded[name]), name
    assert any(weight.detach().any() for name, weight in loaded.items() if "lora_B" in name)
    finished = start(tmp_path, model__name=str(run / SAVED), model__scratch=None, model__adapter=ADAPTER, **LEARNS)
    config = json.loads((finished.model / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(finished.folder / "base"), "others find what it adapts"
    inputs = json.loads((finished.folder / "inputs.json").read_text())["inputs"]["model.name"]
    assert "adapter/adapter_model.safetensors" in inputs and "model.safetensors" in inputs


def goes_on(folder, name):
    """A run that goes on with an adapter, and what its model weighs."""
    went = start(folder, model__name=str(name), model__scratch=None, model__adapter=ADAPTER, **LEARNS).folder
    return went, weights_of(went)


def weights_of(run):
    return {name: weight.clone() for name, weight in trained(run).load("float32").network.named_parameters()}


def test_what_went_on_needs_nothing_of_the_run_that_the_adapter_is_of(run, tmp_path, monkeypatch):
    monkeypatch.setattr(base_copy, "WORTH_SHARING", 1000)
    first = shutil.copytree(run, tmp_path / "first")
    edited(first / SAVED / "adapter_config.json", base_model_name_or_path=str(first / "base"))
    went, before = goes_on(tmp_path, first / SAVED)
    mine, theirs = (folder / "base" / "model.safetensors" for folder in (went, first))
    assert mine.stat().st_ino == theirs.stat().st_ino, "they are on the disk once"
    shutil.rmtree(first)
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(went).items())
    assert not list(went.glob(".base*"))


def test_a_base_of_ones_own_is_found_though_the_adapter_that_went_on_is_gone(run, tmp_path):
    shutil.copytree(run / "base", tmp_path / "own")
    shutil.copytree(run / SAVED, tmp_path / "adapter")
    edited(tmp_path / "adapter" / "adapter_config.json", base_model_name_or_path=str(tmp_path / "own"))
    went, before = goes_on(tmp_path, tmp_path / "adapter")
    assert not (went / "base").exists(), "what has a name of its own is not copied"
    shutil.rmtree(tmp_path / "adapter")
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(went).items())
    shutil.rmtree(tmp_path / "own")
    with pytest.raises(RecipeError, match=r"there is no .*adapter"):
        trained(went)


def test_its_base_is_found_after_the_run_was_moved(run, tmp_path):
    shutil.copytree(run, tmp_path / "moved")
    saved = tmp_path / "moved" / SAVED
    edited(saved / "adapter_config.json", base_model_name_or_path="/nowhere/base")
    assert locate(str(saved), tmp_path).folder == (tmp_path / "moved" / "base").resolve()
    shutil.rmtree(tmp_path / "moved" / "base")
    with pytest.raises(RecipeError, match="is an adapter of /nowhere/base, and there is no"):
        locate(str(saved), tmp_path)
    edited(saved / "adapter_config.json", base_model_name_or_path=str(saved))
    with pytest.raises(RecipeError, match="is an adapter of an adapter"):
        locate(str(saved), tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "IA3"}, "an adapter of kind 'IA3'"),
        ({"use_dora": True}, "use_dora: True"),
        ({"use_rslora": True}, "use_rslora: True"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {".*\\.gate_up_proj": 16.0}}, "alpha_pattern"),
        ({"target_parameters": ["down_proj", "mlp.gate.weight"]}, "chooses among experts"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa"),
        ({"r": 0}, "no usable r"),
        ({"target_modules": ".*proj"}, "no usable r"),
        ({"base_model_name_or_path": None}, "does not say what it adapts"),
    ],
)
def test_what_is_no_plain_lora_is_told_what_it_is(run, tmp_path, changes, reason):
    shutil.copytree(run / SAVED, tmp_path / "adapter")
    edited(tmp_path / "adapter" / "adapter_config.json", **changes)
    with pytest.raises(RecipeError, match=reason):
        locate(str(tmp_path / "adapter"), tmp_path)


def problems(folder, **changes):
    """What the first tier of checks says of a recipe that goes on with an adapter."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(data_with(model__scratch=None, **changes)))
    return {problem.field: problem for problem in examine(path, (), root=folder, probes=PROBES)[1]}


def test_another_adapter_full_tuning_and_a_reference_are_refused_before_anything_loads(run, tmp_path):
    name = str(run / SAVED)
    assert problems(tmp_path, model__name=name, model__adapter=ADAPTER) == {}
    other = problems(tmp_path, model__name=name, model__adapter={"rank": 16, "alpha": 8.0})
    assert other["model.adapter"].reason.endswith("has rank 4, not 16")
    assert "rank: 4, alpha: 8, targets: [" in other["model.adapter"].fix
    whole = problems(tmp_path, model__name=name, model__adapter=None)
    assert "stretto merge" in whole["model.adapter"].fix
    role = problems(
        tmp_path, model__name=name, model__adapter=ADAPTER, roles__critic={"name": name}, algorithm__name="ppo"
    )
    assert "adapters for this role are not available yet" in role["roles.critic.name"].reason
    pulled = problems(tmp_path, model__name=name, model__adapter=ADAPTER, algorithm={"kl": {"coef": 0.1}})
    assert "the reference would be its base" in pulled["model.name"].reason


def test_weights_that_are_not_those_of_the_recipe_are_refused_when_they_are_read(run, tmp_path):
    shutil.copytree(run / SAVED, tmp_path / "adapter")
    edited(tmp_path / "adapter" / "adapter_config.json", target_modules=["q_proj"])
    recipe, files = going_on(tmp_path, tmp_path / "adapter")
    assert recipe.model.adapter.targets == "all-linear"
    load(recipe.model, files, seed=0, device=CPU)  # the weights are of all layers, as the recipe says
    few = recipe.model.model_copy(update={"adapter": recipe.model.adapter.model_copy(update={"targets": ("q_proj",)})})
    with pytest.raises(RecipeError, match="weights for no layer of"):
        load(few, files, seed=0, device=CPU)


def test_who_goes_on_with_an_adapter_on_other_bits_than_it_was_made_on_is_told(run, tmp_path):
    saved = shutil.copytree(run / SAVED, tmp_path / "adapter")
    recipe, files = going_on(tmp_path, saved)
    assert files.adapter.quantize == "none" and files.adapter.other_base("none") is None
    path = saved / "state" / "recipe.json"
    made = json.loads(path.read_text())
    path.write_text(json.dumps(made | {"model": made["model"] | {"quantize": "nf4"}}))
    recipe, files = going_on(tmp_path, saved)
    with pytest.warns(UserWarning, match="trained on a base in nf4, and this one is in full; model.quantize: nf4"):
        load(recipe.model, files, seed=0, device=CPU)
