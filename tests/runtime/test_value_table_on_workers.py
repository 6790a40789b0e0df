"""The table of V* made on several devices: the answers of one device, from processes that only sample and judge."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from running import lines, recipe_in, written
from stretto.cli.main import main
from stretto.errors import RewardError
from stretto.runtime import value as making
from stretto.runtime.plans import sampling_plan
from stretto.workers.launchers import inprocess
from stretto.workers.launchers.inprocess import ThreadLauncher
from stretto.workers.worker import Worker
from tables import ASTAR, made

TWO = {"placement": {"cluster": "2xcpu", "strategy": "flatten"}}

JUDGED = {
    "model__dtype": "float64",
    "roles": {"reward_model": {"name": "scratch"}},
    "rewards": [{"name": "accuracy", "kind": "numeric"}, {"name": "quality", "kind": "model", "weight": 0.5}],
}
"""A reward model beside a reward that compares."""

BY_HAND = [
    {"role": "generate", "devices": ["localhost/cpu:0"]},
    {"role": "reward", "devices": ["localhost/cpu:1"]},
    {"role": "reference", "devices": ["localhost/cpu:1"]},
    {"role": "train", "devices": ["localhost/cpu:0", "localhost/cpu:1"]},
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Tables are kept below the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def workers(monkeypatch):
    """Workers in threads, and how often each was asked what."""
    asked = {}

    class Counted(Worker):
        def __init__(self, assignment):
            super().__init__(assignment)
            self.counts = asked[assignment.device] = {"roles": assignment.roles, "generate": 0, "score": 0}
            assert self.optimizer is None and self.reference is None

        def generate(self, *arguments):
            self.counts["generate"] += 1
            return super().generate(*arguments)

        def score(self, *arguments):
            self.counts["score"] += 1
            return super().score(*arguments)

    monkeypatch.setattr(inprocess, "processes", lambda devices, **told: ThreadLauncher(Counted))
    return asked


def moved(told):
    """The bytes of a table, which is out of the way now."""
    content = Path(told.table).read_bytes()
    os.remove(told.table)
    return content


@pytest.mark.parametrize("strategy", ["auto", "interleave", "separate", "elastic"])
def test_every_device_samples_and_the_table_is_that_of_one(strategy, tmp_path, workers):
    single, _ = made(tmp_path)
    content = moved(single)
    told, _ = made(tmp_path, placement={"cluster": "2xcpu", "strategy": strategy})
    assert (told.table, moved(told)) == (single.table, content)
    assert [counts["roles"] for counts in workers.values()] == [{"generate"}] * 2
    assert all(counts["generate"] for counts in workers.values())


def test_a_table_that_was_interrupted_on_one_device_is_finished_on_two(tmp_path, workers, monkeypatch):
    single, _ = made(tmp_path)
    content = moved(single)
    monkeypatch.setattr(making, "TOGETHER", 7)

    def stop(name, *values):
        if name == "step":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, at=stop)
    assert len(lines(single.table)) == 1 + 7 and not workers
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, at=stop, **TWO)
    assert len(lines(single.table)) == 1 + 7 + 2 * 7, "two engines are given twice as many"
    told, _ = made(tmp_path, **TWO)
    assert told.generated == 30 - 21
    assert moved(told) == content


@pytest.mark.parametrize("cells", [None, BY_HAND], ids=["auto", "by hand"])
def test_a_reward_model_is_asked_where_it_is(cells, tmp_path, workers):
    single, rows = made(tmp_path, **JUDGED)
    moved(single)
    told, again = made(tmp_path, **JUDGED, placement={"cluster": "2xcpu", "cells": cells})
    assert told.table == single.table
    assert list(again) == list(rows)
    assert [row["tokens"] for row in again.values()] == [row["tokens"] for row in rows.values()]
    rewards = [row["reward"] for row in rows.values()]
    assert [row["reward"] for row in again.values()] == pytest.approx(rewards, abs=1e-10)
    assert len(set(rewards)) > 2, "the model has something to say"
    worked = [(counts["generate"] > 0, counts["score"] > 0) for counts in workers.values()]
    if cells is None:  # what is there to score may be too little to share
        assert all(generated for generated, _ in worked) and any(scored for _, scored in worked)
    else:
        assert worked == [(True, False), (False, True)]


def test_a_plan_for_samples_has_nothing_of_training(tmp_path):
    sleeping = [
        {"role": "generate", "devices": ["localhost/cpu:0"], "sleeps": ["train", "reward"]},
        {"role": "reward", "devices": ["localhost/cpu:0"], "sleeps": ["generate", "train"]},
        {"role": "train", "devices": ["localhost/cpu:0"]},
        {"role": "train", "devices": ["localhost/cpu:1"]},
        {"role": "reference", "devices": ["localhost/cpu:1"]},
    ]
    recipe = recipe_in(tmp_path, **ASTAR, **JUDGED, placement={"cluster": "2xcpu", "cells": sleeping})
    plan = sampling_plan(recipe)
    assert [(cell.name, cell.weights, cell.sleeps) for cell in plan.cells] == [
        ("generate", "own", ("reward",)),
        ("reward", "own", ("generate",)),
    ]
    assert plan.priority == {"localhost/cpu:0": ("generate", "reward")}
    assert plan.devices == ("localhost/cpu:0",)
    alone = sampling_plan(recipe_in(tmp_path, **ASTAR))
    assert [cell.role for cell in alone.cells] == ["generate"]


def test_a_lag_that_training_is_allowed_does_not_matter(tmp_path, workers):
    lagging = {"algorithm": {"name": "astar_po_course", "vstar": {"samples": 3}, "correction": {"kind": "token"}}}
    single, rows = made(tmp_path, **lagging)
    moved(single)
    told, again = made(tmp_path, **lagging, placement={"cluster": "2xcpu", "strategy": "separate", "staleness": 1})
    assert (told.table, again) == (single.table, rows)
    assert len(workers) == 2


def test_a_reward_that_always_fails_ends_the_command_and_the_workers(tmp_path, workers):
    picky = "def good(answer, prompt, signals):\n    return {'': 0.0, prompt['reference']: 1.0}[answer]\n"
    (tmp_path / "judge.py").write_text(picky)
    with pytest.raises(RewardError, match="have no verdict"):
        made(tmp_path, rewards=[{"name": "mine", "kind": "judge:good"}], **TWO)


@pytest.mark.slow
def test_one_device_loads_no_ray(tmp_path):
    code = "import sys; from stretto.cli.main import main; main(); sys.exit('ray' in sys.modules)"
    recipe = str(written(tmp_path, **ASTAR))
    done = subprocess.run([sys.executable, "-c", code, "value", recipe, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_command_on_two_processes_makes_the_table_of_one(tmp_path, capsys):
    recipe = str(written(tmp_path, **ASTAR))
    assert main(["value", recipe, "--json"]) == 0
    (table,) = Path(".stretto/vstar").iterdir()
    content = table.read_bytes()
    table.unlink()
    assert main(["value", recipe, "placement.cluster=2xcpu", "--json"]) == 0
    assert table.read_bytes() == content
    capsys.readouterr()
    assert main(["value", recipe, "placement.cluster=2xcpu"]) == 0
    assert "0 answers are new" in capsys.readouterr().out
