"""Sweeps: every combination once, finished runs left alone, a stopped one gone on with, slips refused first."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import stretto
from running import data_with, lines, written
from stretto.api.sweep_runs import shares_of_machine
from stretto.cli.main import main
from stretto.cli.sweep import grid_of
from stretto.errors import RecipeError

SMALL = {"evaluate__every": 0, "run__steps": 3, "checkpoint__every": 1}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_values_are_split_where_no_bracket_or_quote_holds_them():
    grid, fixed = grid_of(["optimizer.lr=1e-5,1e-4", "algorithm.clip=[0.1, 0.2],[0.2, 0.3]", "seed=3", 'x="a,b"'])
    assert grid == {"optimizer.lr": [1e-5, 1e-4], "algorithm.clip": [[0.1, 0.2], [0.2, 0.3]]}
    assert fixed == ["seed=3", 'x="a,b"']


def test_a_sweep_over_three_rates_is_stopped_and_gone_on_with(tmp_path, capsys):
    recipe, grid = written(tmp_path, **SMALL), {"optimizer.lr": [0.0, 0.01, 0.02]}

    def stop(event):
        if event.folder.name == "lr=0.01" and event.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stretto.sweep(recipe, grid, quiet=True, callbacks=[stop])
    (folder,) = Path("runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["lr=0.0", "lr=0.01", "sweep.json"]
    before = (folder / "lr=0.0" / "metrics.jsonl").stat()
    assert main(["sweep", str(recipe), "optimizer.lr=0.0,0.01,0.02"]) == 0
    out = capsys.readouterr().out
    assert "3 runs, 1 of them finished" in out and "lr=0.01: goes on (2 of 3)" in out
    assert "lr=0.02: begins (3 of 3)" in out
    assert (folder / "lr=0.0" / "metrics.jsonl").stat() == before
    for name in ("lr=0.0", "lr=0.01", "lr=0.02"):
        assert [row["step"] for row in lines(folder / name / "metrics.jsonl")] == [1, 2, 3]
        assert [line.split()[:2] for line in out.splitlines() if line.startswith(f"{name}  ")] == [[name, "3"]]
    assert (folder / "sweep.svg").read_text().count("<polyline") == 3
    again = stretto.sweep(recipe, grid, quiet=True)
    assert [setting["optimizer.lr"] for setting in again.settings] == [0.0, 0.01, 0.02]
    assert "lr=0.02" in str(again) and not again.failures


def test_all_that_is_wrong_with_any_combination_is_refused_before_the_first_begins(tmp_path):
    recipe = written(tmp_path, **SMALL)
    with pytest.raises(RecipeError) as caught:
        stretto.sweep(recipe, {"optimizer.lr": [0.1, -1.0], "num_generations": [4]}, quiet=True)
    assert {problem.field for problem in caught.value.problems} == {"optimizer.lr", "num_generations"}
    assert not any(Path("runs").rglob("recipe.yaml"))


def test_a_sweep_that_was_refused_leaves_its_folder_to_what_is_meant(tmp_path):
    place = tmp_path / "place"
    for told in ({"optimizer.lr": [0.1, -1.0]}, {"seed": [0, -1]}):
        with pytest.raises(RecipeError, match=r"optimizer\.lr|negative"):
            stretto.sweep(written(tmp_path), told, folder=place, quiet=True)
    with pytest.raises(RecipeError, match="at_once"):
        stretto.sweep(data_with(), {"seed": [0, 1]}, folder=place, at_once=2, quiet=True)
    assert not place.exists()


@pytest.mark.parametrize(
    "grid",
    [
        {}, None, ["seed"], {"seed": []}, {"seed": "012"}, {"seed": 1}, {"seed": {1: 2}}, {"seed": [{1}]},
        {"seed": range(40), "optimizer.lr": [0.1] * 40},
    ],
)  # fmt: skip
def test_a_grid_that_is_none_is_refused(grid):
    with pytest.raises(RecipeError, match="grid"):
        stretto.sweep(data_with(), grid, quiet=True)
    with pytest.raises(TypeError, match=r"sweep\(\) got an unexpected keyword argument 'misspelt'"):
        stretto.sweep(data_with(), grid, misspelt=1)


def test_a_folder_of_another_sweep_is_refused(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    (place / "mine.txt").write_text("")
    with pytest.raises(RecipeError, match="is no sweep"):
        stretto.sweep(data_with(), {"seed": [0, 1]}, folder=place, quiet=True)
    (place / "mine.txt").unlink()
    (place / "sweep.json").write_text("{}")
    with pytest.raises(RecipeError, match="another recipe or other values"):
        stretto.sweep(data_with(), {"seed": [0, 1]}, folder=place, quiet=True)


def test_functions_given_as_objects_are_part_of_what_a_sweep_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def good(answer, prompt, signals):
        return 1.0

    def bad(answer, prompt, signals):
        return -3.0

    bad.__name__ = bad.__qualname__ = "good"
    grids = [{"seed": (np.int64(seed) for seed in (0,))}, {"seed": np.arange(1)}]
    tried = zip(grids, (good, bad), strict=True)
    found = [stretto.sweep(data_with(**SMALL), grid, rewards=[each], quiet=True) for grid, each in tried]
    assert json.loads((found[0].folder / "sweep.json").read_text())["grid"] == {"seed": [0]}
    assert found[0].runs[0].evaluate().accuracy == 1.0, "it knows the functions that it was given"
    assert [result.runs[0].metrics[-1]["reward/mean"] for result in found] == [1.0, -3.0]
    lowest = max(float(pair.split(",")[1]) for pair in re.findall(r"[\d.]+,[\d.]+", found[1].picture()))
    assert lowest < 360, "a reward below zero is drawn within the picture"


def test_a_run_that_its_own_time_ends_is_noted_and_the_next_begins(tmp_path):
    told, grid = [], {"run.until": ["1s", "1d"]}

    def slow(event):
        time.sleep(1.1 if event.folder.name == "until=1s" else 0)

    found = stretto.sweep(data_with(**SMALL), grid, callbacks=[slow], quiet=True, note=told.append)
    assert found.runs[0].steps < found.runs[1].steps == 3 and not found.failures
    assert any(text.startswith("until=1s: its time is over (run.until): stopped ") for text in told)


def test_without_commas_there_is_nothing_to_sweep(tmp_path, capsys):
    assert main(["sweep", str(written(tmp_path)), "seed=3"]) == 2
    assert "no key has several values" in capsys.readouterr().err


def test_runs_at_once_share_the_cores_or_the_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert shares_of_machine(2) == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]
    with pytest.raises(RecipeError, match="on 4 GPUs"):
        shares_of_machine(5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [set(share) for share in shares_of_machine(2)] == [{"OMP_NUM_THREADS"}] * 2


@pytest.mark.slow
def test_runs_at_once_are_processes_and_survive_a_kill_of_the_sweep(tmp_path):
    recipe = written(tmp_path, **SMALL | {"run__steps": 60})
    command = [sys.executable, "-m", "stretto", "sweep", str(recipe), "seed=0,1", "--at-once", "2", "--folder", "s"]
    files = [tmp_path / "s" / f"seed={seed}" / "metrics.jsonl" for seed in (0, 1)]
    done = 0
    for ending, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        until = time.monotonic() + 60
        while not all(path.is_file() and path.read_bytes().count(b"\n") > done for path in files):
            assert time.monotonic() < until
            time.sleep(0.05)
        os.kill(killed.pid, ending)
        assert killed.wait(60) == code
        done = max(path.read_bytes().count(b"\n") for path in files)
    finished = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert finished.returncode == 0, finished.stderr
    for path in files:
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 61))
    assert "seed=1" in finished.stdout and "trains already" in finished.stdout
