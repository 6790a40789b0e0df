"""A run's folder is read as it is, under way, killed or damaged; what differs between runs is told by key."""

import json

import pytest

from recorded import metrics_row, trajectory, write_run
from stretto.cli.main import main
from stretto.errors import RecipeError
from stretto.report.health import health
from stretto.report.read_run import RunRecord, changed_keys


def test_everything_of_a_run_is_there(tmp_path):
    run = RunRecord(write_run(tmp_path / "one"))
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert run.setting("batch.samples") == 4 and run.setting("batch.nothing", 7) == 7
    assert list(run.sampled) == [1, 2, 3] and len(run.samples(2)) == 8 and run.samples(9) == []
    assert [(span.stage, span.step, span.tokens) for span in run.spans[:2]] == [("generate", 1, 40), ("train", 1, 40)]
    assert run.spans[1].start == pytest.approx(1.2) and run.spans[1].seconds == pytest.approx(0.7)
    assert run.steps == 3 and run.finished and not run.alive


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="holds no recipe"):
        RunRecord(tmp_path)


def test_torn_and_damaged_lines_are_passed_over(tmp_path):
    folder = write_run(tmp_path / "one")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1, 2]\n{"step": "four"}\n{"step": 4, "reward/mean": 0.5, "loss": null}\n{"step": 5, "rew')
    with (folder / "samples" / "step-000002.jsonl").open("a") as file:
        file.write('no row\n{"step": 2, "pro')
    text = (folder / "timeline.json").read_text()
    (folder / "timeline.json").write_text(text.replace('"dur": 700000', '"dur": "long"', 1) + '{"name": "train", "ph"')
    (folder / "plan.json").write_text("{")
    run = RunRecord(folder)
    assert run.metrics[-1] == {"step": 4, "reward/mean": 0.5} and len(run.metrics) == 4
    assert len(run.samples(2)) == 8 and len(run.spans) == 5 and run.plan == {}


def test_a_run_that_has_just_begun_has_no_steps(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("run: {steps: 3}\n")
    run = RunRecord(folder)
    assert (run.metrics, run.spans, run.sampled, run.events, run.plan, run.steps) == ([], [], {}, [], {}, 0)
    assert not run.finished


def test_what_differs_between_recipes_is_told_by_key_and_part(tmp_path):
    recipes = [
        {"run": {"steps": 3, "folder": name}, "optimizer": {"lr": lr}, "rewards": [{"name": "a", "weight": weight}]}
        for name, lr, weight in (("x", 1e-4, 1.0), ("y", 1e-5, 0.5))
    ]
    recipes[1]["batch"] = {"samples": 4}
    runs = [RunRecord(write_run(tmp_path / str(i), recipe=recipe)) for i, recipe in enumerate(recipes)]
    assert changed_keys(runs) == {
        "optimizer.lr": [1e-4, 1e-5],
        "rewards.a.weight": [1.0, 0.5],
        "batch.samples": [None, 4],
    }


def test_step_0_is_no_step_of_training(tmp_path):
    folder = write_run(tmp_path / "one", metrics=[metrics_row(0) | {"eval/accuracy": 0.4}])
    assert RunRecord(folder).steps == 0 and json.loads((folder / "metrics.jsonl").read_text())["step"] == 0


@pytest.mark.parametrize(
    ("steps", "saved", "lost"),
    [
        ([1, 2, 3], 3, ""),
        ([0, 1, 2, 3], 2, ""),
        ([1, 2, 3, 7, 8], 8, "metrics.jsonl lacks steps 4 to 6"),
        ([7, 8], 8, "metrics.jsonl lacks steps 1 to 6"),
        ([0, 1, 3, 5, 6], 8, "metrics.jsonl lacks steps 2, 4, 7 to 8"),
        ([1, 3], 3, "metrics.jsonl lacks step 2"),
        ([], 12, "metrics.jsonl lacks steps 1 to 12"),
        ([], 0, ""),
        ([3, 1, 2, 2], 3, ""),
    ],
)
def test_steps_that_metrics_lack_are_named(tmp_path, steps, saved, lost):
    folder = write_run(tmp_path / "one", metrics=[metrics_row(step) for step in steps])
    (folder / "checkpoints" / f"step-{saved:06d}").mkdir(parents=True)
    (folder / "checkpoints" / "step-000099.unreadable").mkdir()
    assert RunRecord(folder).lost == lost
    told = [finding.text for finding in health(RunRecord(folder)) if "lacks" in finding.text]
    assert told == [f"{lost}; the numbers of this page are of the other steps."] * bool(lost)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "events.jsonl", "timeline.json", "plan.json", "samples/step-000002.jsonl"]
)
@pytest.mark.parametrize("command", ["report", "compare", "samples"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, command, capsys):
    folder = write_run(tmp_path / "one")
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()  # refused to everyone, root included
    arguments = {"report": [], "compare": [str(write_run(tmp_path / "two"))], "samples": ["--step", "2"]}[command]
    code, told = main([command, str(folder), *arguments]), capsys.readouterr()
    assert "bug" not in told.err and "make room" not in told.err and code in (0, 1)
    if code:
        assert f"{folder / name}: cannot be read" in told.err and "fix: make it a file that you may read" in told.err


def test_held_out_answers_are_found_by_step(tmp_path):
    folder = write_run(tmp_path / "one")
    assert RunRecord(folder).evaluated == {}
    for step in (0, 3):
        text = "".join(json.dumps(trajectory(step, group, 0, visit=-1)) + "\n" for group in range(2))
        (folder / "samples" / f"eval-{step:06d}.jsonl").write_text(text)
    run = RunRecord(folder)
    assert list(run.evaluated) == [0, 3] and list(run.sampled) == [1, 2, 3]
    assert [row["prompt"] for row in run.samples(3, held_out=True)] == ["prompt-0", "prompt-1"]
    assert run.samples(1, held_out=True) == []
