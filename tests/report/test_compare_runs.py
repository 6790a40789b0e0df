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
