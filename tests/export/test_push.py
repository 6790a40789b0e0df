"""What a push would upload: the model, a card whose every number was measured, and nothing of the run's state."""

import json
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import yaml
from huggingface_hub import constants
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, LlamaConfig

from exported import ADAPTER, edited, imitating_run, lora_run, model_in, run_of, trained
from running import recipe_in
from stretto.api import exports as api
from stretto.errors import ExportError, RecipeError
from stretto.export.card import CardFacts, quoted, write_card
from stretto.export.push import HuggingFaceHub, push

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class FakeHub:
    """Keeps what it is given."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def publish(self, folder, repo, *, private, message):
        """Notes the call."""
        if self.error:
            raise self.error
        self.calls.append((repo, private, message, sorted(path.name for path in folder.iterdir())))
        return f"https://hub/{repo}"


def card(folder):
    text = (folder / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_an_adapter_without_a_public_base_is_merged_and_pushed_with_its_card(tmp_path):
    run, hub, told = lora_run(tmp_path, evaluate__every=1), FakeHub(), []
    pushed = api.push(run, to="org/tiny", license="apache-2.0", private=True, prompts=3, hub=hub, note=told.append)
    assert pushed.merged and pushed.url == "https://hub/org/tiny" and "the two are merged" in told[0]
    ((repo, private, message, names),) = hub.calls
    assert (repo, private, message) == ("org/tiny", True, "step 2 of a stretto run")
    assert {"README.md", "recipe.yaml", "model.safetensors", "tokenizer.json", "generation_config.json"} <= set(names)
    assert "state" not in names
    AutoModelForCausalLM.from_pretrained(pushed.folder)
    front, body = card(pushed.folder)
    assert front["license"] == "apache-2.0" and front["library_name"] == "transformers" and "base_model" not in front
    last = [row for row in api.Run(run).metrics if "eval/accuracy" in row][-1]
    assert f"{last['eval/accuracy']:.3f} ({last['eval/low']:.3f} to {last['eval/high']:.3f}) at step 2" in body
    assert pushed.proof.sentence in body and "stretto train recipe.yaml" in body
    assert "# root" not in (pushed.folder / "recipe.yaml").read_text(), "no path of this machine"


def test_a_dry_run_writes_the_folder_and_sends_nothing(tmp_path):
    model = tmp_path / "model"
    model_in(model, LlamaConfig(**SIZES, max_position_embeddings=128), kind="gpt-2")
    run, told = run_of(tmp_path, model, model__adapter=None), []
    pushed = api.push(run, to="org/tiny", dry_run=True, prompts=2, note=told.append)
    assert pushed.url is None and not pushed.merged and pushed.folder == run / "push" / "step-000002"
    front, body = card(pushed.folder)
    assert "license" not in front and "states no license" in told[0] and "no accuracy" in body
    again = api.push(run, to="org/tiny", dry_run=True, prompts=2, license="mit")
    assert card(again.folder)[0]["license"] == "mit"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A model of the hub that is in the cache; returns its name."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository, revision = tmp_path / "cache" / "models--org--base", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    model_in(repository / "snapshots" / revision, LlamaConfig(**SIZES, max_position_embeddings=128), kind="gpt-2")
    return "org/base"


@pytest.mark.filterwarnings(
    "ignore:Could not find a config file in org/base:UserWarning"
)  # PEFT's own, without network
def test_an_adapter_of_a_model_of_the_hub_is_pushed_as_one_that_names_it(cached, tmp_path):
    first = run_of(tmp_path, cached, model__adapter=ADAPTER)
    # A run that goes on calls its model by the adapter's folder, which others have not.
    run = run_of(tmp_path, first / "checkpoints" / "step-000002", model__adapter=ADAPTER)
    at = run / "checkpoints" / "step-000002" / "adapter_config.json"
    assert json.loads(at.read_text())["base_model_name_or_path"] == cached
    edited(at, base_model_name_or_path="/a/folder/of/this/machine")
    pushed = api.push(run, to="org/tiny", dry_run=True, prompts=3)
    assert not pushed.merged and pushed.proof.equal == pushed.proof.prompts == 3
    names = {path.name for path in pushed.folder.iterdir()}
    assert "adapter_model.safetensors" in names and not names & {"model.safetensors", "state"}
    assert json.loads((pushed.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == cached
    assert AutoPeftModelForCausalLM.from_pretrained(pushed.folder).active_adapter == "default"
    front, body = card(pushed.folder)
    assert (front["base_model"], front["base_model_relation"], front["library_name"]) == (cached, "adapter", "peft")
    assert f"A LoRA adapter for `{cached}`, trained by reinforcement learning" in body and "AutoPeftModel" in body
    whole = api.push(run, to="org/tiny", dry_run=True, prompts=1, merged=True)
    front, body = card(whole.folder)
    assert whole.merged and (front["base_model"], front["base_model_relation"]) == (cached, "finetune")
    assert f"made from `{cached}`" in body
    # As if the base had been in few bits, which whoever loads the adapter has not.
    model, told = trained(run), []
    section = model.recipe.model.model_copy(update={"quantize": "int8"})
    files = replace(model.files, adapter=replace(model.files.adapter, quantize="int8"))
    model = replace(model, recipe=model.recipe.model_copy(update={"model": section}), files=files)
    apart = push(model, "org/tiny", license="mit", merged=False, private=False, hub=None, most=2, note=told.append)
    assert not apart.merged and apart.proof.logprob_mean > 1e-5 and "not as int8 rounds it" in told[0]


def test_a_model_of_the_hub_that_was_trained_as_a_whole_is_named_as_the_base(cached, tmp_path):
    run = run_of(tmp_path, cached, model__adapter=None)
    front, _ = card(api.push(run, to="org/tiny", dry_run=True, prompts=1).folder)
    assert (front["base_model"], front["base_model_relation"]) == (cached, "finetune")
    read = (run / "inputs.json").read_text()
    (run / "inputs.json").write_text(read.replace("models--org--base", "org"))
    assert trained(run).hub_base is None, "it was a folder of that name"
    (run / "inputs.json").unlink()
    assert trained(run).hub_base == cached, "as far as one can tell"


def test_the_card_of_a_run_that_imitates_says_so_and_how_far_it_came(tmp_path):
    run = imitating_run(tmp_path)
    pushed = api.push(run, to="org/tiny", dry_run=True, prompts=2)
    front, body = card(pushed.folder)
    assert front["tags"] == ["stretto", "supervised-fine-tuning", "sft"]
    told = body.partition("## How it was made")[0]
    assert "trained by supervised fine-tuning (sft) for 2 steps of 4 demonstrations." in told
    assert "    stretto sft recipe.yaml\n" in body
    assert "Demonstrations: synthetic, `copy`." in told
    first, *_, last = [row for row in api.Run(run).metrics if "eval/loss" in row]
    one, two = (
        f"{row['eval/loss']:.3f} ({row['eval/loss_low']:.3f} to {row['eval/loss_high']:.3f})" for row in (last, first)
    )
    assert f"mean over {last['eval/tokens']:g} tokens: {one} at step 2, from {two} before training." in told
    assert not any(word in told for word in ("reinforcement", "reward", "Wilson", "ccuracy", "answers each"))
    model = trained(run)
    judged = model.recipe.model_copy(update={"rewards": recipe_in(tmp_path).rewards})
    facts = CardFacts(repo="org/tiny", license=None, merged=False, proof=pushed.proof, stop=frozenset([0]))
    text = write_card(replace(model, recipe=judged), facts)
    assert "nothing was learned from that:\n\n- `accuracy`: `numeric`, weight 1" in text


def test_names_that_a_hub_would_refuse_are_refused_at_once(run):
    for name in ("tiny", "org/..", "a/b/c", "org/ti ny"):
        with pytest.raises(RecipeError, match="ORG/NAME"):
            api.push(run, to=name, dry_run=True)
    with pytest.raises(RecipeError, match="is no license"):
        api.push(run, to="org/tiny", license="Apache 2.0", dry_run=True)


def test_a_hub_that_refuses_leaves_the_folder(tmp_path):
    run = lora_run(tmp_path)
    with pytest.raises(ExportError, match="no token"):
        api.push(run, to="org/tiny", prompts=2, hub=FakeHub(ExportError("no token")))
    assert (run / "push" / "step-000002" / "README.md").is_file()


def test_what_an_earlier_push_has_left_of_a_model_goes(tmp_path, monkeypatch):
    told = {}
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda self, repo, **settings: f"https://hub/{repo}")
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda self, **settings: told.update(settings))
    assert HuggingFaceHub().publish(tmp_path, "org/tiny", private=True, message="m") == "https://hub/org/tiny"
    left = ["adapter_config.json", "adapter_model.safetensors", "model.safetensors", "model-00001-of-00002.safetensors"]
    goes = [name for name in left if any(fnmatch(name, pattern) for pattern in told["delete_patterns"])]
    assert goes == left and not any(fnmatch("notes.md", pattern) for pattern in told["delete_patterns"])


def test_a_block_holds_whatever_a_recipe_says():
    text = "prompt: |\n  ```\n  # not a heading\n  ````"
    assert quoted(text, "yaml") == f"`````yaml\n{text}\n`````"
