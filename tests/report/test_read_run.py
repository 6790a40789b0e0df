"""A run's folder is read as it is, under way, killed or damaged; what differs between runs is told by key."""

import json

import pytest

from recorded import metrics_row, write_run
from stretto.errors import RecipeError
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
