"""`merge`, `export` and `push` as programs and people meet them: what is printed, exit codes, and what is kept."""

import io
import json
import shutil
from dataclasses import replace

import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from exported import ADAPTER, TEMPLATE, model_in, run_of
from running import data_with
from stretto.api import exports as api
from stretto.cli.main import main
from stretto.errors import RecipeError
from stretto.export import weights
from stretto.export.push import HuggingFaceHub
from stretto.export.saved_model import find

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
"""Sizes of a tiny model."""


@pytest.fixture
def wrong(monkeypatch):
    """Twice the update is merged."""
    right = weights.adapter_updates

    def doubled(*given):
        return {name: replace(update, scale=2 * update.scale) for name, update in right(*given).items()}

    monkeypatch.setattr(weights, "adapter_updates", doubled)


def test_a_merge_is_told_in_lines_or_as_one_document(run, tmp_path, capsys):
    assert main(["merge", str(run), "--to", str(tmp_path / "one"), "--prompts", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["folder", "step", "dtype", "lost", "proof"]
    assert document == json.loads((tmp_path / "one" / "proof.json").read_text()) and document["step"] == 2
    assert document["proof"]["equal"] == document["proof"]["prompts"] == 1
    assert main(["merge", str(run), "--to", str(tmp_path / "two"), "--prompts", "1", "--step", "1"]) == 0
    model, proof, lost = capsys.readouterr().out.splitlines()
    assert model == f"model   {tmp_path / 'two'}  (float32, step 1)"
    assert proof.startswith("proof   1 of 1 greedy answers") and lost.startswith("lost    ")


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_what_is_not_the_runs_model_exits_with_1_and_is_not_kept(run, tmp_path, capsys, wrong, as_json):
    assert main(["merge", str(run), "--to", str(tmp_path / "m"), "--prompts", "1", *as_json]) == 1
    out, error = capsys.readouterr()
    told = json.loads(out) if as_json else {"ok": False, "error": error}
    assert told["ok"] is False and "was not kept" in told["error"] and list(tmp_path.iterdir()) == []


def test_a_push_says_where_it_is_and_a_wrong_one_leaves_nothing(run, tmp_path, capsys, monkeypatch, request):
    here = shutil.copytree(run, tmp_path / "run")
    push = ["push", str(here), "--to", "org/tiny", "--prompts", "1", "--license", "mit"]
    assert main([*push, "--dry-run"]) == 0
    folder, proof, sent = capsys.readouterr().out.splitlines()
    assert folder == f"folder  {here / 'push' / 'step-000002'}" and proof.startswith("proof   1 of 1")
    assert sent.startswith("nothing was sent")
    monkeypatch.setattr(HuggingFaceHub, "publish", lambda self, folder, repo, **told: f"https://hub/{repo}")
    assert main(push) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "at      https://hub/org/tiny"
    request.getfixturevalue("wrong")
    shutil.rmtree(here / "push")
    assert main(push) == 1
    assert "was not kept" in capsys.readouterr().err and list((here / "push").iterdir()) == []


def test_what_makes_no_sense_exits_with_2(run, capsys):
    assert main(["export", str(run)]) == 2
    assert "add --gguf" in capsys.readouterr().err
    assert main(["merge", str(run), "--dtype", "int3", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"][0]["field"] == "--dtype"


@pytest.mark.parametrize("ask", [api.chat, api.merge, api.export_gguf, lambda run: api.push(run, to="org/tiny")])
@pytest.mark.parametrize("adapter", [None, {"rank": 2}])
def test_a_reward_model_answers_nothing_so_nothing_is_made_of_it(tmp_path, ask, adapter):
    rows = {"task": {"source": {"kind": "jsonl", "path": "pairs.jsonl"}}, "rewards": [], "engine": {}, "batch": {}}
    data = data_with(**rows, algorithm={"name": "reward_model"}, model__adapter=adapter)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(RecipeError, match="a reward model answers nothing") as caught:
        ask(tmp_path)
    assert "roles.reward_model.name" in caught.value.problems[0].fix


def llama(folder):
    """A tiny model in a folder of the user's own."""
    return model_in(folder, LlamaConfig(**LLAMA, max_position_embeddings=128), kind="gpt-2")


def tampered(path):
    """Scales numbers of a file of weights, as a base that was updated in place has other ones."""
    weights = load_file(path)
    name = max(weights, key=lambda each: weights[each].numel())
    weights[name] = weights[name] * 3
    path.unlink()  # a file may be shared with the bases of other runs
    save_file(weights, path, metadata={"format": "pt"})


USES = {
    "merge": lambda run: ["merge", str(run)],
    "export": lambda run: ["export", str(run), "--gguf"],
    "push": lambda run: ["push", str(run), "--to", "a/b", "--dry-run"],
    "push merged": lambda run: ["push", str(run), "--to", "a/b", "--dry-run", "--merged"],
    "chat": lambda run: ["chat", str(run)],
    "replay": lambda run: ["replay", str(run), "--step", "2"],
    "eval": lambda run: ["eval", str(run)],
}


@pytest.mark.parametrize("use", USES)
def test_run_with_another_base_is_refused_by_everything_that_uses_its_model(run, tmp_path, capsys, monkeypatch, use):
    mine = shutil.copytree(run, tmp_path / "run")
    tampered(mine / "base/model.safetensors")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    before = sorted(mine.rglob("*"))
    assert main(USES[use](mine)) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "model.name: " in told and "differs from what this run was trained with" in told
    assert "base/model.safetensors" in told.replace(" ", "")
    assert sorted(mine.rglob("*")) == before


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json", "generation_config.json"])
def test_base_folder_of_the_recipe_that_was_updated_since_is_refused(tmp_path, file):
    model = llama(tmp_path / "model")
    run = run_of(tmp_path, model, model__adapter=ADAPTER, run__steps=1)
    assert find(run).step == 1
    if file == "model.safetensors":
        tampered(model / file)
    else:
        (model / file).write_text((model / file).read_text() + "\n")
    with pytest.raises(RecipeError, match=f"{file} differs from what this run was trained with"):
        find(run)


def test_chat_template_of_the_recipe_that_was_changed_since_is_refused_by_merge(tmp_path):
    (tmp_path / "talk.jinja").write_text(TEMPLATE)
    model = llama(tmp_path / "model")
    run = run_of(tmp_path, model, model__adapter=ADAPTER, task__chat_template="talk.jinja", run__steps=1)
    find(run)
    (tmp_path / "talk.jinja").write_text(TEMPLATE.replace("assistant", "model"))
    with pytest.raises(RecipeError, match=r"talk.jinja differs from what this run was trained with"):
        find(run)


def test_template_of_a_base_that_was_cut_is_named_by_merge(run, tmp_path, capsys):
    mine = shutil.copytree(run, tmp_path / "run")
    path = mine / "base/chat_template.jinja"
    path.write_text(path.read_text()[:40])
    assert main(["merge", str(mine)]) == 2
    assert "base/chat_template.jinja" in "".join(capsys.readouterr().err.split())


def test_whole_model_of_a_run_needs_no_base(tmp_path):
    model = llama(tmp_path / "model")
    run = run_of(tmp_path, model, run__steps=1)
    shutil.rmtree(model)
    assert find(run).load("float32").network is not None
