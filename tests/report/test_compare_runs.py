"""Runs beside each other, from folders: keys, numbers, and whether they can be told apart; and pages of sweeps."""

import json

import pytest
import yaml

import stretto
from stretto.cli.main import main
from stretto.report.compare_runs import columns
from stretto.report.read_run import RunRecord
from stretto.report.sweep_page import SweptRun, page, picture


def run_of(folder, *, right=50, n=100, lr=1e-4, seed=0, steps=10, verdicts=True, source="reverse"):
    """A finished run whose first `right` prompts are answered right."""
    folder.mkdir(parents=True)
    recipe = {
        "seed": seed, "task": {"source": {"kind": "synthetic", "name": source}}, "optimizer": {"lr": lr},
        "run": {"steps": 10, "folder": str(folder)},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    rows = [{"step": 0, "eval/accuracy": 0.1, "eval/low": 0.05, "eval/high": 0.17, "eval/n": n}]
    rows += [
        {"step": s, "reward/mean": s / 20, "seconds/step": 2.0, "memory/peak_gb": 1.5} for s in range(1, steps + 1)
    ]
    rows[-1] |= {"eval/accuracy": right / n, "eval/low": right / n - 0.1, "eval/high": right / n + 0.1, "eval/n": n}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [f"p{i}" for i in range(n)]
    event = {"kind": "evaluated", "step": steps, "right": names[:right], "wrong": names[right:]}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n" if verdicts else "")
    return folder


def test_what_differs_and_what_it_came_to(tmp_path, capsys):
    one, other = run_of(tmp_path / "a", right=50), run_of(tmp_path / "b", right=80, lr=1e-3, steps=7)
    assert main(["compare", str(one), str(other)]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["a", "10", "0.50", "0.40", "to", "0.60", "0.4", "2", "1.5"] in lines
    assert ["b", "7", "of", "10", "0.80", "0.70", "to", "0.90", "0.25", "2", "1.5"] in lines
    assert ["optimizer.lr", "0.0001", "0.001"] in lines
    assert "run.folder" not in out
    assert "b is better than a (accuracy +0.30" in out and "the same prompts" in out


def test_runs_that_chance_could_have_made_cannot_be_told_apart(tmp_path):
    compared = stretto.compare(run_of(tmp_path / "a", right=50), run_of(tmp_path / "b", right=53, verdicts=False))
    assert "the recipes are the same" in str(compared)
    assert "a and b cannot be told apart with 100 prompts (accuracy +0.03" in str(compared)
    assert "would show with about" in str(compared)
    assert not compared.differences["a", "b"].paired


def test_prompts_of_another_task_are_no_pairs(tmp_path):
    a, b = run_of(tmp_path / "a", right=50), run_of(tmp_path / "b", right=60, source="sort")
    assert not stretto.compare(a, b).differences["a", "b"].paired
    c = run_of(tmp_path / "c", right=60)
    assert stretto.compare(a, c).differences["a", "c"].paired
    assert stretto.compare(a, c).differences["a", "c"].told_apart


def test_what_is_no_run_and_one_run_alone_are_refused(tmp_path, capsys):
    assert main(["compare", str(run_of(tmp_path / "a"))]) == 2
    assert "name two runs or more" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), str(tmp_path / "a")]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_runs_of_the_same_name_are_told_by_their_folders(tmp_path):
    compared = stretto.compare(run_of(tmp_path / "x" / "a"), run_of(tmp_path / "y" / "a"))
    assert list(compared.differences) == [(str(tmp_path / "x" / "a"), str(tmp_path / "y" / "a"))]


def test_columns_stand_below_each_other_and_steer_nothing():
    assert columns([["a", "bb"], ["ccc", "\x1b"]]) == ["a    bb", "ccc   \ufffd"]


def test_a_sweep_has_a_mean_for_each_setting_and_names_the_best(tmp_path):
    swept = [
        SweptRun(record=RunRecord(run_of(tmp_path / f"lr={lr},seed={seed}", right=right, lr=lr, seed=seed)),
                 setting={"optimizer.lr": lr, "seed": seed})
        for lr, seed, right in ((1e-4, 0, 40), (1e-4, 1, 44), (1e-3, 0, 90), (1e-3, 1, 80))
    ]  # fmt: skip
    text = "\n".join(page(swept))
    lines = [line.split() for line in text.splitlines()]
    assert ["lr", "0.001", "2", "0.850", "0.800", "0.900"] in lines
    assert lines.index(["lr", "0.001", "2", "0.850", "0.800", "0.900"]) < lines.index(
        ["lr", "0.0001", "2", "0.420", "0.400", "0.440"]
    )
    assert text.rstrip().splitlines()[-1].startswith(("lr=0.001,seed=0", "lr=0.001,seed=1"))
    drawn = picture(swept)
    assert drawn.count("<polyline") == 2 and "lr 0.001" in drawn and "held-out accuracy" in drawn


@pytest.mark.parametrize("rows", ["", '{"step": 0, "eval/accuracy": 0.5}\n'])
def test_a_sweep_without_a_step_has_a_picture_all_the_same(tmp_path, rows):
    folder = run_of(tmp_path / "a")
    (folder / "metrics.jsonl").write_text(rows)
    assert picture([SweptRun(record=RunRecord(folder), setting={"seed": 0})]).startswith("<svg")


def rewritten(folder, **changes):
    """The folder with other sections in its recipe."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | changes))
    return folder


EXACT = {"name": "accuracy", "kind": "exact", "weight": 1.0}
LENGTH = {"name": "short", "kind": "overlong", "weight": 0.5}
SIGNAL = {"name": "won", "kind": "signal", "weight": 1.0}


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ({"rewards": [EXACT]}, {"rewards": [{**EXACT, "kind": "numeric"}]}, "their rewards differ ("),
        ({"rewards": [EXACT]}, {"rewards": [EXACT, {**EXACT, "name": "b", "kind": "numeric"}]}, "their rewards differ"),
        ({"rewards": [{**EXACT, "kind": "math"}]}, {"rewards": [{**EXACT, "kind": "a:b"}]}, "their rewards differ"),
        ({"rewards": [{**EXACT, "kind": "numeric", "pick": "last"}]},
         {"rewards": [{**EXACT, "kind": "numeric", "pick": "first"}]}, "their rewards differ (rewards.numeric.pick)"),
        ({"rewards": [SIGNAL], "environment": {"kind": "game", "name": "a"}},
         {"rewards": [SIGNAL], "environment": {"kind": "game", "name": "b"}}, "(rewards.environment.name)"),
        ({"task": {"source": {"kind": "jsonl", "path": "a"}}}, {"task": {"source": {"kind": "jsonl", "path": "b"}}},
         "their tasks differ (task.source.path)"),
        # What decides nothing of right and wrong leaves a winner.
        ({"rewards": [EXACT]}, {"rewards": [{**EXACT, "name": "right", "weight": 2.0}]}, None),
        ({"rewards": [EXACT]}, {"rewards": [EXACT, LENGTH]}, None),
        ({"rewards": [{**EXACT, "kind": "mine:score", "deadline": 5.0}]},
         {"rewards": [{**EXACT, "kind": "mine:score", "deadline": 9.0}]}, None),
        ({"rewards": [EXACT], "environment": {"kind": "tools", "turns": 2}},
         {"rewards": [EXACT], "environment": {"kind": "tools", "turns": 4}}, None),
    ],
)  # fmt: skip
def test_accuracies_that_measure_something_else_have_no_winner(tmp_path, one, other, why):
    a = rewritten(run_of(tmp_path / "a", right=20), **one)
    b = rewritten(run_of(tmp_path / "b", right=80), **other)
    (told,) = stretto.compare(a, b).sentences()
    if why is None:
        assert told.startswith("b is better than a") and "the same prompts" in told
    else:
        assert why in told and "do not measure the same and there is no winner" in told and "better" not in told
    swept = [SweptRun(record=RunRecord(each), setting={"seed": i}) for i, each in enumerate((a, b))]
    assert ("no winner" in "\n".join(page(swept))) == (why is not None)


def test_the_same_prompts_without_verdicts_are_compared_as_shares(tmp_path):
    a, b = run_of(tmp_path / "a", right=20), run_of(tmp_path / "b", right=80, verdicts=False)
    (told,) = stretto.compare(a, b).sentences()
    assert "the same prompts, compared as shares because a run kept no verdicts" in told
    rows = [{"prompt": f"p{i}", "reward": {"value": 1.0, "outcome": float(i < 80), "parts": {}}} for i in range(100)]
    (b / "samples").mkdir()
    (b / "samples" / "eval-000010.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert stretto.compare(a, b).differences["a", "b"].paired, "kept answers say it too"


def test_held_out_rewards_and_lost_steps_are_told(tmp_path):
    a, b = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    rows = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    rows[-1] |= {"eval/reward": 0.75, "eval/reward/part/right": 0.5, "eval/reward/part/form": 0.25}
    (b / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] not in (3, 4)))
    lines = [line.split() for line in str(stretto.compare(a, b)).splitlines()]
    assert ["run", "steps", "accuracy", "95", "%", "interval", "held-out", "reward", "reward", "s/step", "GB"] in lines
    assert ["b", "10", "0.50", "0.40", "to", "0.60", "0.75", "0.4", "2", "1.5"] in lines
    assert ["held-out", "part", "a", "b"] in lines and ["form", "-", "0.25"] in lines
    assert "b: metrics.jsonl lacks steps 3 to 4; its numbers are of the other steps" in str(stretto.compare(a, b))
