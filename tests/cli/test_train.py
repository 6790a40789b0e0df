"""train, resume and eval from the command line: exit codes, what is printed where, and never a traceback."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from running import lines, metrics, written
from stretto.cli.main import main
from stretto.runtime.interrupt import HEARD, TOLD
from tiers import slow_but

EVAL_KEYS = ["accuracy", "interval", "pass_at_k", "reward", "parts", "length_mean", "n"]


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Runs a command in an empty folder that holds tiny.yaml; returns exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path)

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        out, error = capfd.readouterr()
        assert "Traceback" not in out + error
        return code, out, error

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    assert main(["train", str(written(folder)), f"run.folder={json.dumps(str(folder / 'run'))}", "run.steps=2"]) == 0
    return folder / "run"


def test_train_makes_a_run_and_says_where_it_is_and_what_it_achieved(command):
    code, out, error = command("train", "tiny.yaml", "run.steps=2")
    assert (code, error) == (0, "")
    assert "run folder runs/tiny-001" in out
    assert "step 2/2  reward" in out
    assert "held-out accuracy" in out
    assert "model    runs/tiny-001/checkpoints/step-000002" in out
    assert [row["step"] for row in metrics(Path("runs/tiny-001"))] == [0, 1, 2]


def test_what_is_printed_is_plain_text_where_nobody_looks(command):
    _, out, _ = command("train", "tiny.yaml", "run.steps=1")
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        (
            ["batch.sampels=2", "optimizer.lr=fast", "engine.temperature=1000"],
            ["batch.sampels", "optimizer.lr", "engine.temperature"],
        ),
        (["batch.samples=1"], ["batch.samples"]),
        (["algorithm.name=ppo"], ["roles.critic"]),
        (["task.source.name=multiply"], ["task.source.name"]),
        (["rewards=[{kind: vibes}]"], ["rewards.0.kind"]),
        (["model.name=nowhere/at/all", "model.scratch=null"], ["model.name"]),
        (["run.folder=there"], ["run.folder"]),
        (["model.scratch.context=5"], ["task"]),
        (["model.adapter={targets: [query]}"], ["model.adapter.targets"]),
        (["model.adapter={targets: [query]}", "model.scratch.context=6"], ["task", "model.adapter.targets"]),
        (["task={source: {kind: jsonl, path: none.jsonl, name: null}}"], ["task.source.path"]),
        (["task={source: {kind: jsonl, path: empty.jsonl, name: null}}"], ["empty.jsonl"]),
    ],
)
def test_a_wrong_recipe_is_refused_with_2_and_nothing_is_made(command, tmp_path, changes, fields):
    (tmp_path / "there").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    code, out, error = command("train", "tiny.yaml", *changes)
    assert (code, out) == (2, "")
    named = [line.partition(":")[0].rpartition("/")[2] for line in error.splitlines() if line and line[0] != " "]
    assert named[1:] == fields
    assert error.count("    fix: ") == len(fields)
    assert not Path("runs").exists()


def test_a_gpu_that_is_not_there_is_refused_with_2(command, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, error = command("train", "tiny.yaml", "placement.cluster=1xgpu")
    assert code == 2
    assert "torch sees none on this machine" in error


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        (["guards.min_entropy=9.0"], 1, "below guards.min_entropy"),
        (["rewards=[{kind: 'broken:first'}]", "evaluate.every=0"], 2, "ValueError: no verdict"),
        (["guards.min_disk_gb=1e9"], 1, "GB free"),
        (["deadlines.generate=1e-9"], 3, "raise deadlines.generate"),
    ],
)
def test_a_run_that_fails_says_why_and_exits_with_its_code(command, tmp_path, changes, code, text):
    (tmp_path / "broken.py").write_text("def first(*_):\n    raise ValueError('no verdict')\n")
    found, _, error = command("train", "tiny.yaml", *changes)
    assert found == code
    assert text in error


@pytest.mark.parametrize("number", slow_but(signal.SIGTERM, of=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_a_run_that_is_asked_to_end_leaves_a_checkpoint_says_how_to_go_on_and_does(command, tmp_path, number):
    """The reward signals once, from its worker process, at the second step."""
    code = (
        "import os, signal\nfrom contextlib import suppress\nfrom pathlib import Path\n\n"
        "def first(answer, prompt, signals):\n"
        f"    seen = Path({str(tmp_path)!r}, 'seen')\n"
        "    with seen.open('a') as file:\n        file.write('x')\n"
        "    if seen.stat().st_size > 14:\n"
        "        with suppress(FileExistsError):\n"
        "            seen.with_name('pressed').touch(exist_ok=False)\n"
        f"            os.kill({os.getpid()}, {int(number)})\n"
        "    return len(answer)\n"
    )
    (tmp_path / "pressing.py").write_text(code)
    changes = ["rewards=[{kind: 'pressing:first'}]", "checkpoint.every=100", "evaluate.every=0"]
    found, _, error = command("train", "tiny.yaml", *changes)
    heard = HEARD.decode() if number == signal.SIGINT else TOLD.format(number.name)
    assert found == 128 + number
    assert error == f"{heard}stopped after step 1 of 3; go on with: stretto resume runs/tiny-001\n"
    run = Path("runs/tiny-001")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]
    code, out, _ = command("resume", run)
    assert code == 0
    assert "step 1/3: continuing" in out
    if number == signal.SIGTERM:  # the others are the same from here on
        assert command("train", "tiny.yaml", *changes)[0] == 0
        assert metrics(run) == metrics(Path("runs/tiny-002"))


def test_a_run_stops_in_time_and_its_time_may_be_another_when_it_goes_on(command):
    changes = ["run.steps=100000", "checkpoint.every=100000", "evaluate.every=0", "run.until=2s"]
    begun = time.monotonic()
    code, out, error = command("train", "tiny.yaml", *changes)
    assert code == 143
    assert "run.until: " in out
    run = Path("runs/tiny-001")
    (saved,) = (run / "checkpoints").iterdir()
    assert error == f"stopped after step {int(saved.name[5:])} of 100000; go on with: stretto resume {run}\n"
    assert time.monotonic() - begun < 20
    assert command("resume", run, "run.until=1s")[0] == 143


def test_resume_of_a_finished_run_has_nothing_to_do(command, finished):
    before = (finished / "metrics.jsonl").read_bytes()
    code, out, error = command("resume", finished)
    assert (code, error) == (0, "")
    assert "model " in out
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "field", "text"),
    [
        (["optimizer.lr=0.5"], "optimizer.lr", "pass --allow optimizer.lr"),
        (["optimizer.lr=0.5", "--allow", "run"], "optimizer.lr", "pass --allow optimizer.lr"),
        (["engine.temperature=1000.0", "--allow", "engine"], "engine.temperature", "nothing of the model"),
        (["run.stepz=3", "--allow", "run"], "run.stepz", "did you mean"),
        (["batch.samples=1", "--allow", "batch,engine"], "batch.samples", "too few"),
        (["model.scratch.width=32", "--allow", "model"], "model.scratch.width", "a resume cannot change it"),
        (["--allow", "modle"], "--allow", "did you mean model"),
    ],
)
def test_resume_refuses_what_it_may_not_or_cannot_change(command, finished, arguments, field, text):
    before = (finished / "events.jsonl").read_bytes()
    code, _, error = command("resume", finished, *arguments)
    assert code == 2
    assert field in error
    assert text in error
    assert (finished / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize(("name", "fix"), [("resume", "pass --allow model.name"), ("eval", "put it back")])
def test_a_run_whose_base_was_changed_is_refused_by_the_name_of_the_file(command, finished, name, fix):
    base = finished / "base" / "model.safetensors"
    content = base.read_bytes()
    base.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    try:
        code, _, error = command(name, finished)
    finally:
        base.write_bytes(content)
    assert code == 2
    assert "model.name" in error and "base/model.safetensors differs" in error and fix in error


def test_resume_may_change_what_it_was_allowed_to(command):
    command("train", "tiny.yaml", "run.steps=1")
    run = "runs/tiny-001"
    code, _, _ = command("resume", run, "run.steps=2", "optimizer.lr=0.5", "--allow", "run,optimizer.lr")
    assert code == 0
    assert [row.get("learning_rate") for row in lines(f"{run}/metrics.jsonl")] == [None, 0.01, 0.5]
    assert command("resume", run)[0] == 0


@pytest.mark.parametrize("name", ["resume", "eval"])
@pytest.mark.parametrize("target", ["nothing-there", "."])
def test_what_is_no_run_is_refused_with_2(command, name, target):
    code, out, error = command(name, target)
    assert (code, out) == (2, "")
    assert "fix: " in error


def test_eval_of_a_run_is_its_last_accuracy(command, finished):
    code, out, error = command("eval", finished, "--json")
    assert (code, error) == (0, "")
    document = json.loads(out)
    assert list(document) == EVAL_KEYS
    last = metrics(finished)[-1]
    assert document["accuracy"] == last["eval/accuracy"]
    assert document["interval"] == pytest.approx([last["eval/low"], last["eval/high"]])
    assert document["n"] == 4
    code, out, _ = command("eval", finished, "evaluate.pass_k=2")
    assert code == 0
    assert "95 % interval" in out
    assert "pass@2" in out


def test_eval_of_a_recipe_is_the_accuracy_before_training(command, finished, tmp_path):
    code, out, error = command("eval", "tiny.yaml", "--json", "evaluate.pass_k=2")
    assert (code, error) == (0, "")
    document = json.loads(out)
    assert list(document) == EVAL_KEYS
    assert document["accuracy"] == metrics(finished)[0]["eval/accuracy"]
    assert document["pass_at_k"].keys() == {"1", "2"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny.yaml"]


@pytest.mark.parametrize(
    ("change", "code"),
    [("engine.temperature=1000.0", 2), ("optimizer.lr=9.0", 2), ("evaluate.prompts=99", 2), ("batch.samples=3", 2)],
)
def test_eval_of_a_run_refuses_what_is_not_about_asking(command, finished, change, code):
    found, out, _ = command("eval", finished, change, "--json")
    assert found == code
    document = json.loads(out)
    assert document["ok"] is False
    assert [problem["field"] for problem in document["problems"]] == [change.partition("=")[0]]
    assert all(document[key] is None for key in EVAL_KEYS)


def test_eval_without_held_out_prompts_says_so_instead_of_accuracy_0(command):
    code, _, error = command("eval", "tiny.yaml", "evaluate={every: 0}", "task.holdout.prompts=0")
    assert code == 2
    assert "task.holdout.prompts" in error


def test_eval_of_a_run_without_a_checkpoint_fails_with_1(command):
    assert command("train", "tiny.yaml", "run.steps=1")[0] == 0
    shutil.rmtree("runs/tiny-001/checkpoints")
    code, _, error = command("eval", "runs/tiny-001")
    assert code == 1
    assert "no sound checkpoint yet" in error
