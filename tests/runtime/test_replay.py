"""The training half of a recorded step, once more: it comes out the same, and what was altered is named."""

import json
import shutil
import zipfile

import pytest

from running import start
from stretto.api.replay import replay
from stretto.cli.main import main
from stretto.errors import RecipeError
from stretto.workers.launchers import inprocess
from stretto.workers.launchers.inprocess import ThreadLauncher

KINDS = {
    "grpo on two cells": {"algorithm__kl": {"coef": 0.1}, "placement": {"cluster": "2xcpu", "strategy": "elastic"}},
    "dapo that drops": {"algorithm": {"name": "dapo"}, "batch__max_rounds": 3},
    "updates and epochs": {"algorithm": {"name": "rloo"}, "batch__updates": 2, "batch__epochs": 2},
    "reward ppo": {
        "roles": {"critic": {"name": "scratch", "optimizer": None}},
        "algorithm": {"name": "ppo", "kl": {"coef": 0.1, "where": "reward"}},
    },
    "lora on two parts": {
        "model__adapter": {"kind": "lora", "rank": 2, "alpha": 4.0},
        "placement": {"cluster": "2xcpu", "strategy": "flatten"},
    },
}
STEPS = 3


@pytest.fixture(scope="module", params=list(KINDS))
def run(request, tmp_path_factory):
    """The folder of a finished run; several cells are threads of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inprocess, "processes", lambda devices, **told: ThreadLauncher())
        return start(tmp_path_factory.mktemp("run"), run__steps=STEPS, evaluate__every=0, **KINDS[request.param]).folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished run of GRPO on one device."""
    return start(tmp_path_factory.mktemp("plain"), run__steps=STEPS, evaluate__every=0).folder


def test_a_step_comes_out_as_it_was_recorded_wherever_it_was_trained(run):
    found = replay(run, 2)
    assert found.begun == 1
    assert [each.step for each in found.steps] == [2]
    assert found.steps[0].differences == ()
    assert found.steps[0].recorded["grad_norm"] > 0, "otherwise it says nothing"
    assert found.steps[0].off("grad_norm") < 1e-4
    assert found.steps[0].off("loss") < 1e-3 or abs(found.steps[0].replayed["loss"]) < 1e-6
    assert found.weights.moved > 0
    assert found.weights.share < 1e-2
    assert found.reproduced


def test_without_the_checkpoint_before_it_the_steps_from_the_nearest_one_are_replayed(plain, tmp_path):
    run = shutil.copytree(plain, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-000002")
    told = []
    found = replay(run, 3, note=told.append)
    assert [each.step for each in found.steps] == [2, 3]
    assert found.reproduced
    assert any("there is no checkpoint of step 2, so steps 2 to 3 are replayed, from that of step 1" in t for t in told)
    shutil.rmtree(run / "checkpoints")
    found = replay(run, 2, note=told.append)
    assert [found.begun, *(each.step for each in found.steps)] == [0, 1, 2]
    assert found.weights is None, "there is nothing to compare them with"
    assert found.reproduced
    assert any("from the model before training" in t for t in told)


def altered(plain, folder, change, row=5):
    """A copy of a run, one line of whose second step was changed."""
    run = shutil.copytree(plain, folder / "run")
    path = run / "samples" / "step-000002.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[row])
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return run, (rows[row]["prompt"], rows[row]["visit"], rows[row]["attempt"], 0)


def another_token(row):
    (talk,) = row["conversations"]
    place = talk["trained"].index(1)
    talk["tokens"][place] = 6 if talk["tokens"][place] == 5 else 5


def another_reward(row):
    row["reward"]["value"] += 3.0


def another_credit(row):
    talk = row["conversations"][0]
    talk["advantages"] = [
        value + 1.0 * trained for value, trained in zip(talk["advantages"], talk["trained"], strict=True)
    ]


def another_logprob(row):
    talk = row["conversations"][0]
    talk["logprobs"][talk["trained"].index(1)] -= 2.0


def another_text(row):
    row["conversations"][0]["text"] += "0"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (another_token, "log-probability"),
        (another_reward, "advantage"),
        (another_credit, "advantage"),
        (another_logprob, "log-probability"),
        (another_text, "text"),
    ],
)
def test_a_sample_that_was_altered_is_named(plain, tmp_path, change, what):
    run, key = altered(plain, tmp_path, change)
    found = replay(run, 2)
    assert not found.reproduced
    assert key in [one.key for one in found.steps[0].differences if what in one.what]
    assert {one.key for one in found.steps[0].differences} == {key}, "and nobody else"


def test_the_command_tells_it_packs_it_and_fails_where_something_differs(plain, tmp_path, capfd):
    bundle = tmp_path / "bug.zip"
    assert main(["replay", str(plain), "--step", "2", "--bundle", str(bundle)]) == 0
    out = capfd.readouterr().out
    assert "grad_norm" in out
    assert out.rstrip().endswith("reproduced")
    with zipfile.ZipFile(bundle) as file:
        assert set(file.namelist()) >= {
            "replay.json", "versions.json", "recipe.yaml", "plan.json", "metrics.jsonl", "samples/step-000002.jsonl",
        }  # fmt: skip
        assert json.loads(file.read("replay.json"))["ok"]
        assert b"tokens" in file.read("samples/step-000002.jsonl")
    assert main(["replay", str(plain), "--step", "2", "--bundle", str(bundle)]) == 2
    assert "exists already" in capfd.readouterr().err
    run, _ = altered(plain, tmp_path, another_token)
    assert main(["replay", str(run), "--step", "2", "--json"]) == 1
    document = json.loads(capfd.readouterr().out)
    assert not document["ok"]
    assert document["steps"][0]["differences"]


def test_a_bundle_without_text_has_nothing_that_a_prompt_could_be_read_from(plain, tmp_path):
    bundle = tmp_path / "bug.zip"
    replay(plain, 2, bundle=bundle, text=False)
    with zipfile.ZipFile(bundle) as file:
        rows = [json.loads(line) for line in file.read("samples/step-000002.jsonl").splitlines()]
        recipe = file.read("recipe.yaml").decode()
    assert "{text}=" not in recipe
    assert {name for row in rows for name in row} == {
        "step", "prompt", "visit", "attempt", "environment", "reward", "used", "conversations", "failure",
    }  # fmt: skip
    assert not {name for row in rows for talk in row["conversations"] for name in talk} & {"tokens", "text"}


@pytest.mark.parametrize(
    ("step", "spoil", "what"),
    [
        (9, None, "is not there, so step 9 cannot be replayed"),
        (2, '{"step": 2}\n', "does not hold the samples of a step"),
        (2, "nonsense\n", "does not hold the samples of a step"),
    ],
)
def test_what_is_not_recorded_is_refused_with_what_there_is(plain, tmp_path, step, spoil, what):
    run = shutil.copytree(plain, tmp_path / "run")
    if spoil:
        (run / "samples" / "step-000002.jsonl").write_text(spoil)
    with pytest.raises(RecipeError, match=what):
        replay(run, step)


def test_what_a_run_folder_does_not_hold_all_of_is_not_available_yet(plain, tmp_path):
    run = shutil.copytree(plain, tmp_path / "run")
    path = run / "recipe.yaml"
    path.write_text(path.read_text().replace("top_p: 1.0", "top_p: 0.9"))
    with pytest.raises(RecipeError, match="not available yet"):
        replay(run, 2)
