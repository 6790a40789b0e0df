"""`merge`, `export` and `push` as programs and people meet them: what is printed, exit codes, and what is kept."""

import json
import shutil
from dataclasses import replace

import pytest
import yaml

from running import data_with
from stretto.api import exports as api
from stretto.cli.main import main
from stretto.errors import RecipeError
from stretto.export import weights
from stretto.export.push import HuggingFaceHub


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
